//! Virtual ranges over physical handles: no request fails while enough memory is free.
//!
//! The design, its words and its invariants (G1 to G6) are in `docs/pages.md`. Here: [`table`] says what is mapped, [`layout`] keeps
//! blocks and pieces together, [`plan`] decides where a request goes and what is moved for it, [`sources`]
//! finds what, [`assemble`] does that, [`cut`] makes
//! smaller handles of a free one, [`leave`] unmaps what has moved, [`give_back`] returns free pages to the driver.

mod allowance;
mod assemble;
mod cost;
mod cut;
mod give_back;
mod layout;
mod leave;
mod plan;
mod sources;
mod table;

pub(crate) use allowance::Allowance;
pub(crate) use assemble::Haste;
pub(crate) use leave::Leaving;
pub(crate) use plan::PageRules;
pub(crate) use table::{Handle, PageTable, Piece};

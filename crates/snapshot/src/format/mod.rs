//! The two formats of a snapshot, Python's pickle and JSON: reading either into a [`tree::Tree`], and writing either from one layout.

pub(crate) mod json;
pub(crate) mod keys;
pub(crate) mod pickle_read;
pub(crate) mod pickle_write;
pub(crate) mod sink;
pub(crate) mod tree;

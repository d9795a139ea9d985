//! States of an allocator as data: JSON, reports and what a snapshot tells.
#![forbid(unsafe_code)]

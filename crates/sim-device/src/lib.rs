//! A simulated GPU: memory, streams, events, captures, faults and a race detector, with no GPU needed.
#![forbid(unsafe_code)]

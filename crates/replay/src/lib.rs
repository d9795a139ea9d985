//! The operation language: recorded workloads, conformance files, generators and the shadow model.
#![forbid(unsafe_code)]

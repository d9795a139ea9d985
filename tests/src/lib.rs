//! What the integration tests share: a driver whose every answer a test sets and a bench that speaks the golden vectors' notation; a
//! simulated device that is watched, and a lab around it; a machine that does any operation and checks everything after it; a bench for
//! captures and graphs.
#![forbid(unsafe_code)]

/// Methods that a device around the simulated one, its field `sim`, hands on as they are.
macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),*) -> $gives:ty;)*) => {$(
        fn $name(&self, $($argument: $type),*) -> $gives {
            self.sim.$name($($argument),*)
        }
    )*};
}

pub mod alias;
pub mod bench;
pub mod contract;
pub mod fake;
pub mod gpu;
pub mod graph_bench;
pub mod idle_bench;
pub mod lab;
pub mod machine;
pub mod recount;
pub mod rust_text;
pub mod verified;
pub mod watched;

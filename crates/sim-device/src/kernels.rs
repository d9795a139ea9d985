//! What the workbench's kernels touch, and what they are called.

use gpupool_device::{Address, Kernel, code};

/// One operand: a range that is read, or written (and maybe read).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Touch {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) write: bool,
}

impl Touch {
    fn reads(address: Address, bytes: u64) -> Self {
        Self { address: address.0, bytes, write: false }
    }

    fn writes(address: Address, bytes: u64) -> Self {
        Self { address: address.0, bytes, write: true }
    }

    fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes)
    }
}

/// A kernel's operands: what is read first, what is written last.
pub(crate) fn touches(kernel: &Kernel) -> Result<Vec<Touch>, u32> {
    Ok(match *kernel {
        Kernel::Fill { dst, bytes, .. } | Kernel::Add { dst, bytes, .. } => vec![Touch::writes(dst, bytes)],
        Kernel::Copy { dst, src, bytes } => vec![Touch::reads(src, bytes), Touch::writes(dst, bytes)],
        Kernel::Checksum { dst, src, bytes } => vec![Touch::reads(src, bytes), Touch::writes(dst, 8)],
        Kernel::Wait { .. } => Vec::new(),
        // A kernel this crate does not know.
        _ => return Err(code::NOT_SUPPORTED),
    })
}

/// A kernel's operands, if they obey the rules.
pub(crate) fn check(kernel: &Kernel) -> Result<(), u32> {
    let touches = touches(kernel)?;
    let aligned = |t: &Touch| t.address.is_multiple_of(4) && t.bytes.is_multiple_of(4) && t.end() < u64::MAX;
    let apart = match touches.as_slice() {
        [a, b] => a.end() <= b.address || b.end() <= a.address,
        _ => true,
    };
    if touches.iter().all(aligned) && apart { Ok(()) } else { Err(code::INVALID_VALUE) }
}

/// A kernel's name in reports.
pub(crate) fn name(kernel: &Kernel) -> &'static str {
    match kernel {
        Kernel::Fill { .. } => "fill",
        Kernel::Copy { .. } => "copy",
        Kernel::Add { .. } => "add",
        Kernel::Checksum { .. } => "checksum",
        Kernel::Wait { .. } => "wait",
        _ => "kernel",
    }
}

//! What the driver's calls cost, in nanoseconds, as measured on an H200: the prices that decisions go by. On another device they are
//! wrong by some factor; that changes what is worth it, not what is right.

const MIB: u64 = 1 << 20;

/// Moving one handle: mapped, made accessible, and unmapped where it was.
pub(super) const MOVE: u64 = 50_000;

/// Between the measured sizes a price goes in a straight line.
fn at(rows: &[(u64, u64)], bytes: u64) -> u64 {
    let above = rows.iter().position(|(size, _)| *size >= bytes);
    match above {
        Some(0) => rows[0].1,
        Some(n) => {
            let ((from, low), (to, high)) = (rows[n - 1], rows[n]);
            low + (high - low) * (bytes - from) / (to - from)
        }
        None => {
            let (size, price) = rows[rows.len() - 1];
            (u128::from(price) * u128::from(bytes) / u128::from(size)) as u64
        }
    }
}

/// Unmapping one handle.
pub(super) fn unmap(bytes: u64) -> u64 {
    at(&[(2 * MIB, 13_700), (64 * MIB, 21_000), (512 * MIB, 25_300), (2048 * MIB, 38_200)], bytes)
}

/// Releasing one handle.
pub(super) fn release(bytes: u64) -> u64 {
    at(&[(2 * MIB, 9_400), (64 * MIB, 26_100), (512 * MIB, 146_200), (2048 * MIB, 535_000)], bytes)
}

/// Creating one handle, mapping it and making it accessible.
pub(super) fn make(bytes: u64) -> u64 {
    at(&[(2 * MIB, 28_100), (64 * MIB, 42_800), (512 * MIB, 71_600), (2048 * MIB, 111_100)], bytes)
}

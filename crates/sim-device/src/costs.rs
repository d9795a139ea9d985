//! What driver calls and kernels cost in virtual time.
//!
//! The rows of [`CostModel::h200`] were measured on one H200 (driver 580, CUDA 13). Between two rows a cost is linear
//! in bytes, below the first row it is the first row's, beyond the last it goes on with the slope of the last two.
//! Calls whose price nobody measured are marked *assumed*; no comparison of allocation policies depends on one.

/// Nanoseconds against bytes, linear between rows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Curve {
    rows: Vec<(u64, u64)>,
}

impl Curve {
    /// A curve through `(bytes, nanoseconds)` rows, which are sorted by bytes. No rows: always zero.
    #[must_use]
    pub fn new(rows: impl Into<Vec<(u64, u64)>>) -> Self {
        let mut rows = rows.into();
        rows.sort_unstable();
        rows.dedup_by_key(|r| r.0);
        Self { rows }
    }

    /// Nanoseconds for `bytes`.
    #[must_use]
    pub fn at(&self, bytes: u64) -> u64 {
        match self.rows.as_slice() {
            [] => 0,
            [(_, only)] => *only,
            [(first, ns), ..] if bytes <= *first => *ns,
            rows => {
                let upper = rows.partition_point(|r| r.0 < bytes).min(rows.len() - 1);
                let ((x0, y0), (x1, y1)) = (rows[upper - 1], rows[upper]);
                let (x0, y0, x1, y1) = (i128::from(x0), i128::from(y0), i128::from(x1), i128::from(y1));
                let ns = y0 + (y1 - y0) * (i128::from(bytes) - x0) / (x1 - x0);
                u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
            }
        }
    }
}

/// Prices of all calls, in nanoseconds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CostModel {
    /// Plain allocation.
    pub mem_alloc: Curve,
    /// Plain free, without the wait for the device.
    pub mem_free: Curve,
    /// Reserve addresses.
    pub address_reserve: Curve,
    /// Give addresses back.
    pub address_free: Curve,
    /// Create a handle.
    pub mem_create: Curve,
    /// Release a handle.
    pub mem_release: Curve,
    /// Map a handle that is mapped nowhere else.
    pub mem_map: Curve,
    /// Map a handle that is mapped elsewhere too.
    pub mem_map_alias: u64,
    /// Make one mapping accessible.
    pub mem_set_access: Curve,
    /// The same for a mapping that is accessible already.
    pub mem_set_access_again: u64,
    /// Thousandths that one mapping costs more when a single call makes 256 of them accessible; linear from 1 to 256.
    pub set_access_many_permille: u64,
    /// Unmap one mapping.
    pub mem_unmap: Curve,
    /// Thousandths that one mapping costs more when a single call unmaps 256 of them; linear from 1 to 256.
    pub unmap_many_permille: u64,
    /// Pin memory of the host. Assumed.
    pub host_alloc: Curve,
    /// Give it back. Assumed.
    pub host_free: Curve,
    /// A copy between the device and pinned memory. Assumed.
    pub host_copy: Curve,
    /// Allocate from a driver's pool that has the memory. Assumed.
    pub pool_alloc: u64,
    /// Free in stream order. Assumed.
    pub pool_free: u64,
    /// Make, destroy or ask a driver's pool. Assumed.
    pub pool_other: u64,
    /// Free and total memory.
    pub mem_info: u64,
    /// Create an event.
    pub event_create: u64,
    /// Destroy an event.
    pub event_destroy: u64,
    /// Record an event.
    pub event_record: u64,
    /// Query an event, or look once before waiting for one.
    pub event_query: u64,
    /// Make a stream wait.
    pub stream_wait_event: u64,
    /// A stream's capture status.
    pub capture_status: u64,
    /// A stream's capture frontier.
    pub capture_frontier: u64,
    /// Exchange the thread's capture mode, once.
    pub exchange_capture_mode: u64,
    /// Begin a capture.
    pub begin_capture: u64,
    /// End a capture.
    pub end_capture: u64,
    /// Instantiate, per node.
    pub instantiate_node: u64,
    /// Upload, per node.
    pub upload_node: u64,
    /// Launch, per node.
    pub launch_node: u64,
    /// Destroy an executable, per node.
    pub exec_destroy_node: u64,
    /// Read or destroy a graph. Assumed.
    pub graph_other: u64,
    /// Create a stream.
    pub stream_create: u64,
    /// Destroy a stream.
    pub stream_destroy: u64,
    /// Launch a kernel or host function, host side. Assumed.
    pub launch: u64,
    /// A kernel's fixed time on the device. Assumed.
    pub kernel: u64,
    /// A kernel's time on the device for the bytes it reads and writes. Assumed.
    pub kernel_bytes: Curve,
}

const MIB: u64 = 1 << 20;

/// Rows of the five measured sizes, microseconds times ten.
fn measured(tenths: [u64; 5]) -> Curve {
    let sizes = [2 * MIB, 20 * MIB, 64 * MIB, 512 * MIB, 2048 * MIB];
    Curve::new(sizes.into_iter().zip(tenths).map(|(bytes, t)| (bytes, t * 100)).collect::<Vec<_>>())
}

impl CostModel {
    /// As measured on an H200.
    #[must_use]
    pub fn h200() -> Self {
        Self {
            mem_alloc: measured([317, 361, 359, 703, 1_999]),
            mem_free: measured([276, 359, 450, 1_760, 5_900]),
            address_reserve: measured([5, 6, 20, 22, 24]),
            address_free: measured([4, 5, 16, 17, 20]),
            mem_create: measured([75, 75, 82, 241, 262]),
            mem_release: measured([94, 137, 261, 1_462, 5_350]),
            mem_map: measured([7, 6, 6, 8, 9]),
            mem_map_alias: 1_130,
            mem_set_access: measured([199, 201, 340, 467, 840]),
            mem_set_access_again: 270,
            set_access_many_permille: 236,
            mem_unmap: measured([137, 136, 210, 253, 382]),
            unmap_many_permille: 117,
            host_alloc: Curve::new([(0, 100_000), (1 << 30, 300_000_000)]),
            host_free: Curve::new([(0, 50_000), (1 << 30, 100_000_000)]),
            host_copy: Curve::new([(0, 10_000), (1 << 30, 20_000_000)]),
            pool_alloc: 1_000,
            pool_free: 1_000,
            pool_other: 1_000,
            mem_info: 4_900,
            event_create: 75,
            event_destroy: 75,
            event_record: 146,
            event_query: 135,
            stream_wait_event: 110,
            capture_status: 20,
            capture_frontier: 23,
            exchange_capture_mode: 9,
            begin_capture: 150,
            end_capture: 150,
            instantiate_node: 440,
            upload_node: 120,
            launch_node: 630,
            exec_destroy_node: 220,
            graph_other: 500,
            stream_create: 1_850,
            stream_destroy: 1_850,
            launch: 2_000,
            kernel: 2_000,
            kernel_bytes: Curve::new([(0, 0), (3_000_000, 1_000)]),
        }
    }

    /// Everything takes no time at all.
    #[must_use]
    pub fn free() -> Self {
        Self::default()
    }

    /// What one call costs that makes mappings of these sizes accessible, `again` of them being so already.
    pub(crate) fn set_access(&self, new: &[u64], again: u64) -> u64 {
        let count = new.len() as u64;
        let sum = new.iter().map(|&bytes| self.mem_set_access.at(bytes)).sum();
        many(sum, count, self.set_access_many_permille) + again * self.mem_set_access_again
    }

    /// What one call costs that unmaps mappings of these sizes.
    pub(crate) fn unmap(&self, sizes: &[u64]) -> u64 {
        let sum = sizes.iter().map(|&bytes| self.mem_unmap.at(bytes)).sum();
        many(sum, sizes.len() as u64, self.unmap_many_permille)
    }
}

/// `sum` with the surcharge for `count` mappings in one call.
fn many(sum: u64, count: u64, permille_at_256: u64) -> u64 {
    let extra = permille_at_256 * (count.saturating_sub(1)).min(255) / 255;
    sum + sum / 1_000 * extra
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_met_and_the_space_between_them_is_linear() {
        let c = CostModel::h200();
        assert_eq!(c.mem_alloc.at(2 * MIB), 31_700);
        assert_eq!(c.mem_alloc.at(512 * MIB), 70_300);
        assert_eq!(c.mem_free.at(2048 * MIB), 590_000);
        assert_eq!(c.mem_alloc.at(11 * MIB), 33_900, "half way between 31.7 and 36.1");
        assert_eq!(c.mem_alloc.at(512), 31_700, "below the first row");
        assert_eq!(c.mem_free.at(4096 * MIB), 590_000 + (590_000 - 176_000) * 2048 / 1536, "slope of the last two");
        assert_eq!(CostModel::free().mem_alloc.at(MIB), 0);
    }

    #[test]
    fn many_mappings_cost_what_was_measured_for_256() {
        let c = CostModel::h200();
        let pages = vec![2 * MIB; 256];
        assert_eq!(c.set_access(&pages[..1], 0), 19_900);
        let page = c.set_access(&pages, 0) / 256;
        assert!((24_500..24_700).contains(&page), "{page}");
        let page = c.unmap(&pages) / 256;
        assert!((15_200..15_400).contains(&page), "{page}");
        assert_eq!(c.set_access(&[], 1), 270);
    }
}

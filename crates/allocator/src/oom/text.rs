//! The report in words: ours, and PyTorch's.

use std::fmt;

use super::{Advice, OutOfMemory, PinnedBlock};
use crate::config::LimitSource;

/// Lines of each list.
const LINES: usize = 6;

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RaiseLimit { driver_free } => {
                write!(f, "raise the limit: the driver still has {} free", Size(*driver_free))
            }
            Self::SynchronizeStreams { pending } => write!(
                f,
                "{} was freed but other streams may still use it: synchronise them, or free after they are done",
                Size(*pending)
            ),
            Self::ShareStreams { other_streams } => write!(
                f,
                "{} is free on other streams in segments that they still use: allocate on fewer streams, and retire (`retire_stream`) those that are done",
                Size(*other_streams)
            ),
            Self::ReleasePools { free } => {
                write!(f, "{} is free in private pools that are held: drop their graphs, or share pools", Size(*free))
            }
            Self::ParkPools { free } => write!(
                f,
                "{} is free in pools of graphs: let them be parked when memory is short, or lend (IdleOptions)",
                Size(*free)
            ),
            Self::Fragmented { free, largest_run } => write!(
                f,
                "{} is free for this stream, but the longest run is {}: drop the blocks that pin it, allocate long-lived blocks first, \
                 or set max_split_size",
                Size(*free),
                Size(*largest_run)
            ),
            Self::OtherUsers { bytes } => {
                write!(f, "{} of the device is held by others: other processes, contexts or libraries", Size(*bytes))
            }
            Self::DropOutliving { bytes, blocks } => write!(
                f,
                "{} stays because {blocks} live blocks outlive the graphs of their pool: drop them",
                Size(*bytes)
            ),
            Self::LargerThanDevice => f.write_str("the request is larger than the whole device"),
        }
    }
}

/// Bytes as a person reads them, in PyTorch's way.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0;
        if n <= 1 << 10 {
            write!(f, "{n} bytes")
        } else if n <= 1 << 20 {
            write!(f, "{:.2} KiB", n as f64 / 1024.0)
        } else if n <= 1 << 30 {
            write!(f, "{:.2} MiB", n as f64 / 1_048_576.0)
        } else {
            write!(f, "{:.2} GiB", n as f64 / 1_073_741_824.0)
        }
    }
}

/// By how much less there is than was asked for, where that is so little that rounding may hide it.
struct Short {
    asked: u64,
    there: u64,
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.asked.checked_sub(self.there) {
            Some(short) if short > 0 && short <= self.asked / 100 => {
                write!(f, " ({} less than asked for)", Size(short))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory on GPU {}: {} requested by stream {}",
            self.device,
            Size(self.requested),
            self.stream
        )?;
        if self.pool.is_default() {
            f.write_str(" (default pool)")?;
        } else {
            write!(f, " (pool {})", self.pool)?;
        }
        if self.in_capture {
            f.write_str(", inside a capture")?;
        }
        writeln!(f)?;
        writeln!(f, "  asked of the driver: {} for a segment", Size(self.segment_size))?;
        if let Some(limit) = self.limit {
            let who = match limit.source {
                LimitSource::Fraction => "the memory fraction",
                LimitSource::Configuration => "the configuration",
                LimitSource::User => "a call",
            };
            write!(
                f,
                "  limit:               {} (set by {who}); it bounds this allocator's segments only",
                Size(limit.bytes)
            )?;
            match self.reserved.saturating_add(self.segment_size).saturating_sub(limit.bytes) {
                0 => writeln!(f)?,
                over => writeln!(f, ", and this one would exceed it by {}", Size(over))?,
            }
        }
        match self.driver_error {
            None => {
                let (free, total) = (self.driver.free, self.driver.total);
                let short = Short { asked: self.segment_size, there: free };
                writeln!(f, "  driver:              {} free of {}{short}", Size(free), Size(total))?;
            }
            Some(e) => writeln!(f, "  driver:              did not tell what is free ({e})")?,
        }
        let cached = self.reserved - (self.live + self.pending).min(self.reserved);
        writeln!(
            f,
            "  this allocator:      {} reserved = {} live + {} pending + {} free",
            Size(self.reserved),
            Size(self.live),
            Size(self.pending),
            Size(cached)
        )?;
        writeln!(
            f,
            "  largest free run:    {}{}; {} is free between live blocks",
            Size(self.largest_free_run),
            Short { asked: self.requested, there: self.largest_free_run },
            Size(self.inactive_split)
        )?;
        if self.away + self.lent + self.parkable > 0 {
            let [away, lent, parkable] = [self.away, self.lent, self.parkable].map(Size);
            writeln!(
                f,
                "  idle pools:          {away} away (parked or suspended), {lent} lent, {parkable} more could go"
            )?;
        }
        for free in self.free.iter().take(LINES) {
            writeln!(
                f,
                "  free:                {} in pool {} on stream {}, longest run {}",
                Size(free.bytes),
                free.pool,
                free.stream,
                Size(free.largest_run)
            )?;
        }
        if let Some(pinned) = &self.pinned {
            write!(
                f,
                "  pinned:              the segment of {} at {} by {} in",
                Size(pinned.size),
                pinned.address,
                Size(pinned.pinned_bytes)
            )?;
            for block in &pinned.blocks {
                write!(f, " {block}")?;
            }
            writeln!(f)?;
        }
        for owned in self.owners.iter().take(LINES) {
            writeln!(f, "  live:                {} in {} blocks of {}", Size(owned.bytes), owned.blocks, owned.owner)?;
        }
        for graph in self.graphs.iter().take(LINES) {
            let name = format!("graph g{}:", graph.id);
            let (written, own) = (Size(graph.written), Size(graph.exclusive));
            writeln!(f, "  {name:<20} may write {written}, of which {own} is its own")?;
        }
        for advice in &self.advice {
            writeln!(f, "  what would help:     {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for PinnedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.address, Size(self.size))?;
        if let Some(owner) = &self.owner {
            write!(f, " of {owner}")?;
        }
        if let Some(graph) = self.graph {
            write!(f, ", a result of g{graph}")?;
        }
        f.write_str(")")
    }
}

impl OutOfMemory {
    /// The figures in PyTorch's words, for those who grep for them. The advice at its end is ours.
    #[must_use]
    pub fn pytorch_message(&self) -> String {
        let mut out = format!(
            "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free. ",
            Size(self.segment_size),
            self.device,
            Size(self.driver.total),
            Size(self.driver.free)
        );
        if let Some(limit) = self.limit {
            out += &format!("{} allowed; ", Size(limit.bytes));
        }
        let private = self.free_in_private_pools;
        let allocated = self.live + private;
        out += &format!("Of the allocated memory {} is allocated by PyTorch, ", Size(allocated));
        if private > 0 {
            out += &format!("with {} allocated in private pools (e.g., CUDA Graphs), ", Size(private));
        }
        let rest = self.reserved.saturating_sub(allocated);
        out += &format!("and {} is reserved by PyTorch but unallocated.", Size(rest));
        for advice in &self.advice {
            out += &format!(" {advice}.");
        }
        out
    }
}

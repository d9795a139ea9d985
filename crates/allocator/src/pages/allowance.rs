//! How much of the time moves and cuts may take.
//!
//! A move is worth what it saves, but who asks again and again pays again and again: training whose weights stay, random sizes on many threads
//! that queue in the driver. So what is spent on keeping memory tight is bounded by a share of the time that goes by, the preset's. Where
//! more was spent growth takes the place of moves, the further the more was: a workload ends with as much room as lets it keep within its
//! share. Memory that is short is a reason to spend all the same.
//!
//! It goes by the device's clock, so what is moved on a GPU differs from run to run. On a simulated device time is virtual, and nothing does.

use crate::arena::{FIRST_ROOM, MOST_ROOM};

/// Nanoseconds of unused time that are kept at most, and what there is at the beginning. The recordings' first passes need that.
const MOST: i64 = 30_000_000;

/// Once time is used up growth may take what is held to as much beyond the peak as in a first repetition ([`FIRST_ROOM`]), and to a sixteenth
/// more for each so many nanoseconds that were spent beyond it, up to [`MOST_ROOM`]. Whoever needs more than that goes on moving.
const OVERDRAWN: u64 = 5_000_000;

/// Time that moves may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    /// Nanoseconds; less than none once more was spent.
    left: i64,
    /// The time at which it was brought up to date.
    seen: u64,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { left: MOST, seen: 0 }
    }
}

impl Allowance {
    /// At `now`, where moves may take one part in `share` of the time: `None` while they may go on, else up to how many sixteenths of the peak
    /// beyond it growth takes their place.
    pub(crate) fn room(&mut self, now: u64, share: u64) -> Option<u64> {
        let earned = now.saturating_sub(self.seen) / share.max(1);
        // The time that makes no whole nanosecond counts next time.
        self.seen += earned * share.max(1);
        self.left = self.left.saturating_add_unsigned(earned).min(MOST);
        (self.left <= 0).then(|| MOST_ROOM.min(FIRST_ROOM + self.left.unsigned_abs() / OVERDRAWN))
    }

    /// Moves took so many nanoseconds of the driver.
    pub(crate) fn spend(&mut self, ns: u64) {
        self.left = self.left.saturating_sub_unsigned(ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn moves_take_their_share_of_the_time_and_what_was_put_by() {
        let mut allowance = Allowance::default();
        let mut spent = 0;
        for now in (0..32_000 * MS).step_by(MS as usize) {
            if allowance.room(now, 32).is_none() {
                allowance.spend(MS);
                spent += MS;
            }
        }
        let expected = 1_000 * MS + MOST as u64;
        assert!(spent.abs_diff(expected) <= MS, "{spent}");
    }

    #[test]
    fn unused_time_is_kept_up_to_a_bound() {
        let mut allowance = Allowance::default();
        assert_eq!(allowance.room(u64::MAX / 2, 32), None);
        allowance.spend(MOST as u64);
        assert_eq!(allowance.room(u64::MAX / 2, 32), Some(FIRST_ROOM));
    }

    #[test]
    fn the_more_was_overdrawn_the_more_room_growth_has() {
        let mut allowance = Allowance::default();
        allowance.spend(MOST as u64);
        let rooms = (0..4).map(|_| {
            let room = allowance.room(0, 32);
            allowance.spend(OVERDRAWN);
            room
        });
        assert_eq!(rooms.collect::<Vec<_>>(), [0, 1, 2, 3].map(|more| Some(FIRST_ROOM + more)));
        allowance.spend(MOST as u64 * 100);
        assert_eq!(allowance.room(0, 32), Some(MOST_ROOM));
        let mut allowance = Allowance { left: -4 * OVERDRAWN as i64, seen: 0 };
        // It is earned back.
        assert_eq!(allowance.room(32 * 3 * OVERDRAWN, 32), Some(FIRST_ROOM + 1));
        assert_eq!(allowance.room(32 * (4 * OVERDRAWN + 1), 32), None);
    }

    #[test]
    fn time_in_small_steps_is_not_lost() {
        let mut allowance = Allowance::default();
        allowance.spend(MOST as u64 + 1_000);
        assert!((0..32_000).all(|now| allowance.room(now, 32).is_some()));
        assert_eq!(allowance.room(32 * 1_001, 32), None);
    }
}

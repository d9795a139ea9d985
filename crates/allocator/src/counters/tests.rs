//! Beside figures that are counted plainly, one movement at a time.

use super::*;

/// A block where it is now: its part, bytes, and bytes asked for.
type Block = (Part, i64, i64);

/// What every figure must be.
#[derive(Default)]
struct Model {
    allocation: StatArray,
    allocated_bytes: StatArray,
    requested_bytes: StatArray,
    active: StatArray,
    active_bytes: StatArray,
    inactive_split: StatArray,
    inactive_split_bytes: StatArray,
}

impl Model {
    fn arrays(&mut self) -> [&mut StatArray; 7] {
        [
            &mut self.allocation,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ]
    }

    fn handed_out(&mut self, (part, bytes, requested): Block) {
        self.allocation.increase(part, 1);
        self.allocated_bytes.increase(part, bytes);
        self.active.increase(part, 1);
        self.active_bytes.increase(part, bytes);
        self.requested_bytes.increase(part, requested);
    }

    fn no_longer_live(&mut self, (part, bytes, _): Block) {
        self.allocation.decrease(part, 1);
        self.allocated_bytes.decrease(part, bytes);
    }

    fn no_longer_active(&mut self, (part, bytes, requested): Block) {
        self.active.decrease(part, 1);
        self.active_bytes.decrease(part, bytes);
        self.requested_bytes.decrease(part, requested);
    }

    fn inactive(&mut self, (part, bytes, _): Block, n: i64) {
        self.inactive_split.change(part, n);
        self.inactive_split_bytes.change(part, n * bytes);
    }
}

/// Where blocks are.
#[derive(Default)]
struct Places {
    indexed: Vec<Block>,
    binned: Vec<Block>,
    live: Vec<Block>,
    pending: Vec<Block>,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % n
    }

    fn take(&mut self, from: &mut Vec<Block>) -> Option<Block> {
        (!from.is_empty()).then(|| from.swap_remove(self.below(from.len())))
    }
}

/// As the shortest way does for small blocks, and the long one for large ones.
fn hand_out_of_bin(counters: &ArenaCounters, watches: &mut Watches, (part, bytes, requested): Block) {
    if part == Part::Large {
        counters.came_out_of_bin(part, bytes);
        counters.handed_out(watches, part, bytes, requested, (-1, -bytes));
    } else if counters.handed_out_of_bin(watches, bytes, requested) {
        counters.note_handed_out(watches, part);
    }
}

/// As [`hand_out_of_bin`].
fn free_into_bin(counters: &ArenaCounters, watches: &mut Watches, (part, bytes, requested): Block) {
    if part == Part::Large {
        counters.freed(watches, part, bytes, requested);
        counters.freed_to_bin(watches, part, bytes);
    } else if counters.freed_into_bin(watches, bytes, requested) {
        counters.note_split(watches, part);
    }
}

/// One movement of a block, or something else that must change no figure. Returns nothing where there is no such block.
fn step(
    random: &mut Random,
    (counters, watches): (&ArenaCounters, &mut Watches),
    model: &mut Model,
    at: &mut Places,
) -> Option<()> {
    match random.below(13) {
        0 => {
            let part = Part::ALL[random.below(2)];
            let bytes = 512 * (1 + random.below(40)) as i64;
            counters.split(watches, part, 1, bytes);
            let block = (part, bytes, bytes - random.below(512) as i64);
            model.inactive(block, 1);
            at.indexed.push(block);
        }
        1 => {
            let block @ (part, bytes, requested) = random.take(&mut at.indexed)?;
            counters.handed_out(watches, part, bytes, requested, (-1, -bytes));
            model.inactive(block, -1);
            model.handed_out(block);
            at.live.push(block);
        }
        2 | 3 => {
            let block = random.take(&mut at.binned)?;
            hand_out_of_bin(counters, watches, block);
            model.inactive(block, -1);
            model.handed_out(block);
            at.live.push(block);
        }
        4 | 5 => {
            let block = random.take(&mut at.live)?;
            free_into_bin(counters, watches, block);
            model.no_longer_live(block);
            model.no_longer_active(block);
            model.inactive(block, 1);
            at.binned.push(block);
        }
        6 => {
            let block @ (part, bytes, requested) = random.take(&mut at.live)?;
            counters.freed(watches, part, bytes, requested);
            counters.freed_to_index(watches, part, bytes, (1, bytes));
            model.no_longer_live(block);
            model.no_longer_active(block);
            model.inactive(block, 1);
            at.indexed.push(block);
        }
        7 => {
            let block @ (part, bytes, _) = random.take(&mut at.live)?;
            counters.became_pending(watches, part, bytes);
            model.no_longer_live(block);
            at.pending.push(block);
        }
        8 => {
            let block @ (part, bytes, requested) = random.take(&mut at.pending)?;
            counters.was_pending(part, bytes, requested);
            counters.went_into_bin(watches, part, bytes);
            counters.rewatch(watches);
            model.no_longer_active(block);
            model.inactive(block, 1);
            at.binned.push(block);
        }
        9 => {
            // Its bin is emptied.
            let block @ (part, bytes, _) = random.take(&mut at.binned)?;
            counters.came_out_of_bin(part, bytes);
            counters.split(watches, part, 0, 0);
            at.indexed.push(block);
        }
        10 => {
            // The long way.
            let block @ (part, bytes, requested) = random.take(&mut at.binned)?;
            counters.came_out_of_bin(part, bytes);
            counters.handed_out(watches, part, bytes, requested, (-1, -bytes));
            model.inactive(block, -1);
            model.handed_out(block);
            at.live.push(block);
        }
        11 if random.below(20) == 0 => {
            counters.reset_accumulated();
            model.arrays().into_iter().flat_map(StatArray::each).for_each(Stat::reset_accumulated);
        }
        12 if random.below(20) == 0 => {
            counters.reset_peaks(watches);
            model.arrays().into_iter().flat_map(StatArray::each).for_each(Stat::reset_peak);
        }
        _ => return None,
    }
    Some(())
}

#[test]
fn what_is_derived_is_what_plain_counting_gives() {
    for seed in 1..40u64 {
        let mut random = Random(0x9E37_79B9_7F4A_7C15 ^ seed);
        let (counters, mut model, mut at) = (ArenaCounters::default(), Model::default(), Places::default());
        let watches = &mut Watches::default();
        for _ in 0..600 {
            if step(&mut random, (&counters, &mut *watches), &mut model, &mut at).is_none() {
                continue;
            }
            let c = counters.read();
            let counted = [
                c.allocation,
                c.active,
                c.inactive_split,
                c.allocated_bytes,
                c.active_bytes,
                c.inactive_split_bytes,
                c.requested_bytes,
            ];
            for (figure, (counted, expected)) in counted.into_iter().zip(model.arrays()).enumerate() {
                assert_eq!(counted, *expected, "figure {figure}, seed {seed}");
            }
            let binned = at.binned.iter().fold((0, 0), |sum, (_, bytes, _)| (sum.0 + 1, sum.1 + bytes));
            assert_eq!(counters.binned(), binned, "seed {seed}");
            assert_eq!(counters.any_live(), !at.live.is_empty());
            assert_eq!(counters.any_pending(), !at.pending.is_empty());
        }
    }
}

#[test]
fn a_recording_knows_the_most_bytes_that_were_handed_out_at_once() {
    let (counters, watches) = (ArenaCounters::default(), &mut Watches::default());
    let block = (Part::Small, 1024, 1000);
    (0..3).for_each(|_| counters.handed_out(watches, block.0, block.1, block.2, (0, 0)));
    (0..3).for_each(|_| free_into_bin(&counters, watches, block));
    counters.start_recording(watches);
    hand_out_of_bin(&counters, watches, block);
    hand_out_of_bin(&counters, watches, block);
    free_into_bin(&counters, watches, block);
    hand_out_of_bin(&counters, watches, block);
    assert_eq!(counters.end_recording(watches), 2048);
}

#[test]
fn every_hand_out_free_and_merge_is_a_change_and_so_is_what_is_held_of_a_free_block() {
    let (counters, watches) = (ArenaCounters::default(), &mut Watches::default());
    let block @ (part, bytes, requested) = (Part::Small, 4096, 4000);
    let movements: [&dyn Fn(&mut Watches); 9] = [
        &|watches| counters.handed_out(watches, part, bytes, requested, (0, 0)),
        &|watches| free_into_bin(&counters, watches, block),
        &|watches| hand_out_of_bin(&counters, watches, block),
        &|watches| counters.freed(watches, part, bytes, requested),
        &|watches| counters.split(watches, part, 1, bytes),
        &|watches| counters.split(watches, part, -1, -bytes),
        &|watches| counters.split(watches, part, 1, bytes),
        &|watches| counters.split(watches, part, 0, -bytes / 2),
        &|watches| counters.split(watches, part, 0, bytes / 2),
    ];
    for (at, movement) in movements.into_iter().enumerate() {
        let before = counters.changes();
        movement(watches);
        assert!(counters.changes() > before, "movement {at}");
    }
}

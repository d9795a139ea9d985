//! The race detector: it finds what is wrong, and only that.
#![allow(clippy::unwrap_used, clippy::panic)]

use gpupool_device::{
    Address, Call, CaptureMode, Device, EventHandle, ExecHandle, GraphDevice, InstantiateFlags, Kernel, StreamHandle,
    StreamKind, Workbench, code,
};
use gpupool_sim_device::{Report, ReportKind, Scheduler, SimConfig, SimDevice};

const PAGE: u64 = 2 << 20;
const SCHEDULERS: [Scheduler; 4] =
    [Scheduler::InOrder, Scheduler::Adversarial, Scheduler::Random { seed: 1 }, Scheduler::Random { seed: 2 }];

fn device(scheduler: Scheduler) -> SimDevice {
    SimDevice::new(SimConfig::default().with_scheduler(scheduler))
}

fn stream(d: &SimDevice) -> StreamHandle {
    d.stream_create(StreamKind::NonBlocking).unwrap()
}

fn fill(dst: Address, value: u32) -> Kernel {
    Kernel::Fill { dst, bytes: 64, value }
}

fn sum(src: Address, dst: Address) -> Kernel {
    Kernel::Checksum { dst, src, bytes: 64 }
}

fn order(d: &SimDevice, first: StreamHandle, then: StreamHandle) {
    let e = d.event_create().unwrap();
    d.event_record(e, first).unwrap();
    d.stream_wait_event(then, e).unwrap();
    d.event_destroy(e).unwrap();
}

fn capture(d: &SimDevice, s: StreamHandle, record: impl FnOnce()) -> ExecHandle {
    d.begin_capture(s, CaptureMode::Global).unwrap();
    record();
    let g = d.end_capture(s).unwrap();
    d.instantiate(g, InstantiateFlags::default()).unwrap()
}

fn kinds(d: &SimDevice) -> Vec<ReportKind> {
    d.reports().iter().map(|r| r.kind).collect()
}

/// fault-catalogue 14: nobody recorded the second stream, so its kernel races with the block's next owner.
#[test]
fn fault_14_a_block_reused_under_another_streams_kernel_is_a_race() {
    for scheduler in SCHEDULERS {
        let d = device(scheduler);
        let (s1, s2, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
        d.own(x, 64, 1, s1);
        d.launch_as(s2, sum(x, x.offset(128)), 1).unwrap();
        d.disown(x, 64);
        d.own(x, 64, 2, s1);
        d.launch_as(s1, fill(x, 3), 2).unwrap();
        d.run_until_idle();
        assert_eq!(kinds(&d), [ReportKind::Race], "{scheduler:?}");
        let r: &Report = &d.reports()[0];
        let earlier = r.earlier.as_ref().unwrap();
        let mut sides =
            [(r.access.stream, r.access.tag, r.access.operation), (earlier.stream, earlier.tag, earlier.operation)];
        sides.sort();
        assert_eq!(sides, [(s1, Some(2), "fill"), (s2, Some(1), "checksum")]);
        assert_eq!((r.address, r.bytes, r.owner.unwrap().tag), (x, 64, 2));
        assert!(r.to_string().starts_with(&format!("race at {x}, 64 bytes: ")), "{r}");

        let d = device(scheduler);
        let (s1, s2, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
        d.launch(s2, sum(x, x.offset(128))).unwrap();
        order(&d, s2, s1);
        d.launch(s1, fill(x, 3)).unwrap();
        d.run_until_idle();
        assert_eq!(kinds(&d), [], "recorded and waited for");
    }
}

/// fault-catalogue 14, the other way about: the old owner submits after the block was given away.
#[test]
fn a_submission_by_a_stale_owner_is_reported_even_in_stream_order() {
    let d = device(Scheduler::InOrder);
    let (s, x) = (stream(&d), d.mem_alloc(PAGE).unwrap());
    d.own(x, 64, 1, s);
    d.launch_as(s, fill(x, 1), 1).unwrap();
    d.disown(x, 64);
    d.launch_as(s, fill(x, 1), 1).unwrap();
    d.own(x, 64, 2, s);
    d.launch_as(s, fill(x, 2), 2).unwrap();
    d.launch_as(s, sum(x, x.offset(128)), 1).unwrap();
    assert_eq!(kinds(&d), [ReportKind::StaleOwner; 2]);
    let [freed, given] = [0, 1].map(|i| d.reports()[i].owner.unwrap());
    assert_eq!((freed.tag, freed.live, given.tag, given.live), (1, false, 2, true));
    d.run_until_idle();
    assert_eq!(d.take_reports().len(), 2, "in stream order there is no race");
    assert_eq!((d.reports().len(), d.reports_found()), (0, 0));
}

/// fault-catalogue 16: a new stream with the old one's number is not ordered after the old one's work.
#[test]
fn fault_16_a_recycled_handle_orders_nothing() {
    let d = device(Scheduler::InOrder);
    let (a, x) = (stream(&d), d.mem_alloc(PAGE).unwrap());
    d.launch(a, fill(x, 1)).unwrap();
    d.run_until_idle();
    d.stream_destroy(a).unwrap();
    let b = stream(&d);
    d.launch(b, fill(x, 2)).unwrap();
    d.run_until_idle();
    assert_eq!(kinds(&d), [ReportKind::Race], "the host never saw the first one complete");
}

/// fault-catalogue 18: the stream waits for the event, the host does not, and unmaps.
#[test]
fn fault_18_an_unmap_that_the_host_did_not_wait_for() {
    let setup = |scheduler| {
        let d = device(scheduler);
        let (s, r, h) = (stream(&d), d.address_reserve(2 * PAGE).unwrap(), d.handle_create(PAGE).unwrap());
        d.map(r, PAGE, h).unwrap();
        d.set_access(r, PAGE).unwrap();
        d.launch(s, fill(r, 1)).unwrap();
        (d, s, r, h)
    };
    for scheduler in SCHEDULERS {
        let (d, s, r, _) = setup(scheduler);
        d.unmap(r, PAGE).unwrap();
        assert_eq!(d.stream_synchronize(s).unwrap_err().code, code::ILLEGAL_ADDRESS);
        assert_eq!(kinds(&d), [ReportKind::IllegalAddress]);
        assert_eq!(d.reports()[0].withdrawn.unwrap().call, Call::MemUnmap);
        assert_eq!(d.mem_info().unwrap_err().code, code::ILLEGAL_ADDRESS);

        let (d, _, r, _) = setup(scheduler);
        d.run_until_idle();
        d.unmap(r, PAGE).unwrap();
        assert_eq!(kinds(&d), [ReportKind::UnmappedInUse], "lucky timing is not an order");

        let (d, s, r, h) = setup(scheduler);
        d.unmap(r, PAGE).unwrap();
        d.map(r, PAGE, h).unwrap();
        d.set_access(r, PAGE).unwrap();
        d.stream_synchronize(s).unwrap();
        assert_eq!(kinds(&d), [ReportKind::MappedAfterSubmission], "moved away and back under the kernel");

        let (d, s, r, h) = setup(scheduler);
        let alias = r.offset(PAGE);
        d.map(alias, PAGE, h).unwrap();
        d.set_access(alias, PAGE).unwrap();
        d.stream_synchronize(s).unwrap();
        d.launch(s, fill(alias, 2)).unwrap();
        d.run_until_idle();
        d.unmap(r, PAGE).unwrap();
        assert_eq!(kinds(&d), [], "the old address is done, though the alias is in use");
    }
}

/// fault-catalogue 36: a later capture of the pool takes the place of a block that the first graph's user still reads.
#[test]
fn fault_36_a_replay_that_clobbers_what_another_capture_handed_out() {
    let d = device(Scheduler::InOrder);
    let (s, x) = (stream(&d), d.mem_alloc(PAGE).unwrap());
    let a = capture(&d, s, || {
        d.own(x, 64, 1, s);
        d.launch_as(s, fill(x, 1), 1).unwrap();
        d.disown(x, 64);
    });
    let b = capture(&d, s, || {
        d.own(x, 64, 2, s);
        d.launch_as(s, fill(x, 2), 2).unwrap();
    });
    d.graph_launch(b, s).unwrap();
    assert_eq!(kinds(&d), []);
    d.graph_launch(a, s).unwrap();
    assert_eq!(kinds(&d), [ReportKind::StaleOwner], "b's output is still held");
    d.launch_as(s, sum(x, x.offset(128)), 1).unwrap();
    assert_eq!(kinds(&d).len(), 2, "and nobody may read the first graph's output any more");
    let r = &d.reports()[0];
    assert_eq!((r.access.tag, r.access.graph.is_some(), r.owner.unwrap().tag), (Some(1), true, 2));
}

/// fault-catalogue 38: memory handed out after the capture is the graph's temporary.
#[test]
fn fault_38_memory_outside_the_pool_that_is_a_graphs_temporary() {
    for scheduler in SCHEDULERS {
        let d = device(scheduler);
        let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
        let g = capture(&d, s, || {
            d.own(x, 64, 1, s);
            d.launch_as(s, fill(x, 1), 1).unwrap();
            d.disown(x, 64);
            d.own(x, 64, 2, s);
            d.launch_as(s, fill(x, 2), 2).unwrap();
            d.disown(x, 64);
        });
        d.graph_launch(g, s).unwrap();
        d.stream_synchronize(s).unwrap();
        assert_eq!(kinds(&d), [], "one place twice in one capture");
        d.own(x, 64, 9, t);
        d.launch_as(t, fill(x, 3), 9).unwrap();
        d.graph_launch(g, s).unwrap();
        d.run_until_idle();
        let found = kinds(&d);
        assert!(found.contains(&ReportKind::StaleOwner) && found.contains(&ReportKind::Race), "{found:?}");
    }
}

#[test]
fn graphs_that_share_memory_race_on_two_streams_and_not_on_one() {
    for scheduler in SCHEDULERS {
        for ordered in [true, false] {
            let d = device(scheduler);
            let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
            let a = capture(&d, s, || d.launch(s, fill(x, 1)).unwrap());
            let b = capture(&d, s, || d.launch(s, sum(x, x.offset(128))).unwrap());
            d.graph_launch(a, s).unwrap();
            if ordered {
                order(&d, s, t);
            }
            d.graph_launch(b, t).unwrap();
            d.run_until_idle();
            assert_eq!(kinds(&d).len(), usize::from(!ordered));
        }
    }
}

#[test]
fn branches_of_one_graph_race_unless_joined() {
    for scheduler in SCHEDULERS {
        for joined in [true, false] {
            let d = device(scheduler);
            let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
            let g = capture(&d, s, || {
                d.launch(s, fill(x, 1)).unwrap();
                order(&d, s, t);
                d.launch(t, fill(x.offset(64), 2)).unwrap();
                if joined {
                    order(&d, t, s);
                }
                d.launch(s, sum(x.offset(64), x)).unwrap();
                order(&d, t, s);
            });
            d.graph_launch(g, s).unwrap();
            d.graph_launch(g, t).unwrap();
            d.run_until_idle();
            assert_eq!(kinds(&d).is_empty(), joined, "{scheduler:?}");
        }
    }
}

#[test]
fn what_the_host_saw_orders_what_it_submits_next() {
    let waits: [fn(&SimDevice, StreamHandle, EventHandle); 6] = [
        |d, _, e| d.event_synchronize(e).unwrap(),
        |d, s, _| d.stream_synchronize(s).unwrap(),
        |d, _, _| d.device_synchronize().unwrap(),
        |d, _, e| {
            while !d.event_query(e).unwrap() {
                d.step();
            }
        },
        |d, s, _| {
            while !d.stream_query(s).unwrap() {
                d.step();
            }
        },
        |d, _, _| {
            let y = d.mem_alloc(64).unwrap();
            d.mem_free(y).unwrap();
        },
    ];
    for (i, wait) in waits.into_iter().enumerate() {
        let d = device(Scheduler::Adversarial);
        let (s, t, x, e) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap(), d.event_create().unwrap());
        d.launch(s, fill(x, 1)).unwrap();
        d.event_record(e, s).unwrap();
        wait(&d, s, e);
        d.launch(t, fill(x, 2)).unwrap();
        d.run_until_idle();
        assert_eq!(kinds(&d), [], "wait {i}");
    }
    let d = device(Scheduler::Adversarial);
    let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
    d.launch(s, fill(x, 1)).unwrap();
    d.run_until_idle();
    d.launch(t, fill(x, 2)).unwrap();
    d.run_until_idle();
    assert_eq!(kinds(&d), [ReportKind::Race], "that it happens to be done is not known");
}

#[test]
fn threads_know_what_they_were_told_where_knowledge_is_not_shared() {
    for told in [true, false] {
        let d = SimDevice::new(SimConfig { shared_host_order: false, ..SimConfig::default() });
        let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
        d.launch(s, fill(x, 1)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                d.stream_synchronize(s).unwrap();
                if told {
                    d.share_host_knowledge();
                }
            });
        });
        d.launch(t, fill(x, 2)).unwrap();
        d.run_until_idle();
        assert_eq!(kinds(&d).is_empty(), told);
    }
}

#[test]
fn readers_collide_only_across_a_hand_out() {
    for handed in [true, false] {
        let d = device(Scheduler::InOrder);
        let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
        d.launch(s, sum(x, x.offset(128))).unwrap();
        if handed {
            d.own(x, 64, 1, t);
        }
        d.launch(t, sum(x, x.offset(256))).unwrap();
        d.run_until_idle();
        assert_eq!(kinds(&d).len(), usize::from(handed));
    }
}

#[test]
fn an_alias_is_the_same_memory_and_a_freed_address_is_not() {
    let d = device(Scheduler::InOrder);
    let (s, t, r, h) = (stream(&d), stream(&d), d.address_reserve(2 * PAGE).unwrap(), d.handle_create(PAGE).unwrap());
    for at in [r, r.offset(PAGE)] {
        d.map(at, PAGE, h).unwrap();
        d.set_access(at, PAGE).unwrap();
    }
    d.launch(s, fill(r, 1)).unwrap();
    d.launch(t, fill(r.offset(PAGE), 1)).unwrap();
    d.run_until_idle();
    assert_eq!(kinds(&d), [ReportKind::Race]);
    assert_eq!(d.reports()[0].address, r.offset(PAGE));
    let x = d.mem_alloc(PAGE).unwrap();
    d.mem_free(x).unwrap();
    d.launch(s, fill(x, 1)).unwrap();
    assert_eq!(d.stream_synchronize(s).unwrap_err().code, code::ILLEGAL_ADDRESS);
    assert_eq!(d.reports()[1].withdrawn.unwrap().call, Call::MemFree);
}

#[test]
fn dead_streams_and_graphs_do_not_pile_up_in_the_clocks_nor_hide_races() {
    let d = device(Scheduler::InOrder);
    let x = d.mem_alloc(PAGE).unwrap();
    let first = stream(&d);
    d.launch(first, fill(x, 1)).unwrap();
    d.run_until_idle();
    d.stream_destroy(first).unwrap();
    for i in 0..500 {
        let s = stream(&d);
        let g = capture(&d, s, || d.launch(s, fill(x.offset(4096), i)).unwrap());
        d.graph_launch(g, s).unwrap();
        d.stream_synchronize(s).unwrap();
        d.exec_destroy(g).unwrap();
        d.stream_destroy(s).unwrap();
    }
    assert_eq!(kinds(&d), []);
    let last = stream(&d);
    d.launch(last, fill(x, 2)).unwrap();
    d.run_until_idle();
    assert_eq!(kinds(&d), [ReportKind::Race], "the first stream's write was never waited for");
}

#[test]
fn at_most_64_reports_are_kept_and_all_are_counted() {
    let d = device(Scheduler::InOrder);
    let (s, t, x) = (stream(&d), stream(&d), d.mem_alloc(PAGE).unwrap());
    for i in 0..100 {
        d.launch(s, fill(x.offset(64 * i), 1)).unwrap();
        d.launch(t, fill(x.offset(64 * i), 1)).unwrap();
    }
    d.run_until_idle();
    assert_eq!((d.reports().len(), d.reports_found()), (64, 100));
    let quiet = SimDevice::new(SimConfig { race_detector: false, ..SimConfig::default() });
    let (s, t, x) = (stream(&quiet), stream(&quiet), quiet.mem_alloc(PAGE).unwrap());
    quiet.launch(s, fill(x, 1)).unwrap();
    quiet.launch_as(t, fill(x, 1), 4).unwrap();
    quiet.run_until_idle();
    assert_eq!(quiet.reports(), []);
}

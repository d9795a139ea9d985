//! Streams, events and host functions.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use gpupool_device::{Device, EventHandle, GraphDevice, Kernel, StreamHandle, StreamKind, Workbench, code};

use super::{Check, Subject, add, check, code_of, copy, holding, plain, set, stream, word};

pub(super) fn checks<S: Subject>() -> Vec<Check<S>> {
    vec![
        check("work runs in the order of its stream", order),
        holding("an event is complete once what came before it is", events),
        check("an event that was never recorded is complete and holds nobody up", never_recorded),
        holding("recording an event again forgets what it was recorded for", recorded_again),
        holding("a wait takes an event as it is then", waits),
        holding("an event may be destroyed while somebody waits for it", destroyed_event),
        holding("a destroyed stream completes its work", destroyed_stream),
        check("unknown handles are refused", unknown),
        holding("blocking streams wait for the legacy stream, others do not", legacy),
        holding("each thread has a default stream of its own", per_thread),
        check("host functions run in stream order", host_functions),
        holding("reading waits for the stream", reading),
        check("the capture mode is the thread's own", modes),
        check("waiting for the device waits for all streams", device_wide),
    ]
}

fn order<S: Subject>(s: &S) {
    let (d, st, x) = (s.device(), stream(s.device()), plain(s.device()));
    for i in 0..100 {
        d.launch(st, add(x, i)).unwrap();
        d.launch(st, copy(x.offset(4), x)).unwrap();
    }
    assert_eq!([word(d, st, x), word(d, st, x.offset(4))], [4950; 2]);
    d.mem_free(x).unwrap();
}

fn events<S: Subject>(s: &S) {
    let (d, st, e, gate) =
        (s.device(), stream(s.device()), s.device().event_create().unwrap(), s.device().gate_create().unwrap());
    d.launch(st, Kernel::Wait { gate }).unwrap();
    d.event_record(e, st).unwrap();
    assert!(!d.event_query(e).unwrap());
    d.gate_open(gate).unwrap();
    d.event_synchronize(e).unwrap();
    assert!(d.event_query(e).unwrap());
    d.event_destroy(e).unwrap();
    assert_eq!(code_of(d.event_destroy(e)), code::INVALID_HANDLE);
}

fn never_recorded<S: Subject>(s: &S) {
    let (d, st, e) = (s.device(), stream(s.device()), s.device().event_create().unwrap());
    assert!(d.event_query(e).unwrap());
    d.event_synchronize(e).unwrap();
    d.stream_wait_event(st, e).unwrap();
    d.stream_synchronize(st).unwrap();
}

fn recorded_again<S: Subject>(s: &S) {
    let d = s.device();
    let (a, b, e, gate) = (stream(d), stream(d), d.event_create().unwrap(), d.gate_create().unwrap());
    d.launch(a, Kernel::Wait { gate }).unwrap();
    d.event_record(e, a).unwrap();
    d.event_record(e, b).unwrap();
    d.event_synchronize(e).unwrap();
    d.gate_open(gate).unwrap();
    d.stream_synchronize(a).unwrap();
}

fn waits<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let (a, b, c) = (stream(d), stream(d), stream(d));
    let (e, gate, later) = (d.event_create().unwrap(), d.gate_create().unwrap(), d.gate_create().unwrap());
    d.launch(a, Kernel::Wait { gate }).unwrap();
    d.launch(a, set(x, 1)).unwrap();
    d.event_record(e, a).unwrap();
    d.stream_wait_event(b, e).unwrap();
    // What the event is recorded for afterwards is not waited for.
    d.launch(c, Kernel::Wait { gate: later }).unwrap();
    d.event_record(e, c).unwrap();
    d.launch(b, copy(x.offset(4), x)).unwrap();
    d.gate_open(gate).unwrap();
    assert_eq!(word(d, b, x.offset(4)), 1);
    d.gate_open(later).unwrap();
    d.stream_synchronize(c).unwrap();
    d.mem_free(x).unwrap();
}

fn destroyed_event<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let (a, b, e, gate) = (stream(d), stream(d), d.event_create().unwrap(), d.gate_create().unwrap());
    d.launch(a, Kernel::Wait { gate }).unwrap();
    d.launch(a, set(x, 1)).unwrap();
    d.event_record(e, a).unwrap();
    d.stream_wait_event(b, e).unwrap();
    d.event_destroy(e).unwrap();
    d.launch(b, copy(x.offset(4), x)).unwrap();
    d.gate_open(gate).unwrap();
    assert_eq!(word(d, b, x.offset(4)), 1);
    d.mem_free(x).unwrap();
}

fn destroyed_stream<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let (a, b, e, gate) = (stream(d), stream(d), d.event_create().unwrap(), d.gate_create().unwrap());
    d.launch(a, Kernel::Wait { gate }).unwrap();
    d.launch(a, add(x, 3)).unwrap();
    d.event_record(e, a).unwrap();
    d.stream_destroy(a).unwrap();
    assert!(!d.event_query(e).unwrap());
    assert_eq!(code_of(d.launch(a, add(x, 1))), code::INVALID_HANDLE);
    d.gate_open(gate).unwrap();
    d.event_synchronize(e).unwrap();
    assert_eq!(word(d, b, x), 3);
    d.mem_free(x).unwrap();
}

fn unknown<S: Subject>(s: &S) {
    let d = s.device();
    let (e, st) = (EventHandle(0x7777_7770), StreamHandle(0x7777_7770));
    let known = stream(d);
    let codes = [
        code_of(d.event_query(e)),
        code_of(d.event_synchronize(e)),
        code_of(d.event_record(e, known)),
        code_of(d.event_destroy(e)),
        code_of(d.stream_wait_event(known, e)),
        code_of(d.stream_synchronize(st)),
        code_of(d.stream_destroy(st)),
        code_of(d.stream_destroy(StreamHandle::LEGACY)),
        code_of(d.stream_destroy(StreamHandle::PER_THREAD)),
        code_of(d.begin_capture(st, gpupool_device::CaptureMode::Global)),
    ];
    assert_eq!(codes, [code::INVALID_HANDLE; 10]);
    d.stream_destroy(known).unwrap();
    assert_eq!(code_of(d.stream_destroy(known)), code::INVALID_HANDLE);
}

fn legacy<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let (blocking, free) = (d.stream_create(StreamKind::Blocking).unwrap(), stream(d));
    let gate = d.gate_create().unwrap();
    d.launch(StreamHandle::LEGACY, Kernel::Wait { gate }).unwrap();
    d.launch(free, set(x.offset(8), 5)).unwrap();
    // Completes while the gate is closed.
    assert_eq!(word(d, free, x.offset(8)), 5);
    d.launch(StreamHandle::LEGACY, set(x, 1)).unwrap();
    d.launch(blocking, copy(x.offset(4), x)).unwrap();
    d.launch(StreamHandle::LEGACY, add(x.offset(4), 1)).unwrap();
    assert!(!s.stream_query(blocking).unwrap());
    d.gate_open(gate).unwrap();
    assert_eq!(word(d, StreamHandle::LEGACY, x.offset(4)), 2);
    d.mem_free(x).unwrap();
}

fn per_thread<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let gate = d.gate_create().unwrap();
    d.launch(StreamHandle::PER_THREAD, Kernel::Wait { gate }).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            d.launch(StreamHandle::PER_THREAD, set(x, 1)).unwrap();
            // Completes while the other thread's stream waits.
            assert_eq!(word(d, StreamHandle::PER_THREAD, x), 1);
        });
    });
    assert!(!s.stream_query(StreamHandle::PER_THREAD).unwrap());
    d.gate_open(gate).unwrap();
    d.stream_synchronize(StreamHandle::PER_THREAD).unwrap();
    d.mem_free(x).unwrap();
}

fn host_functions<S: Subject>(s: &S) {
    let (d, st, x) = (s.device(), stream(s.device()), plain(s.device()));
    let seen = Arc::new(Mutex::new(Vec::new()));
    for i in 0..5 {
        let there = Arc::clone(&seen);
        d.launch(st, add(x, 1)).unwrap();
        d.launch_host_function(st, Box::new(move || there.lock().unwrap().push(i))).unwrap();
    }
    let count = Arc::new(AtomicU32::new(0));
    let there = Arc::clone(&count);
    s.host_function(
        st,
        Arc::new(move || {
            there.fetch_add(1, SeqCst);
        }),
    )
    .unwrap();
    d.stream_synchronize(st).unwrap();
    assert_eq!((seen.lock().unwrap().clone(), count.load(SeqCst)), (vec![0, 1, 2, 3, 4], 1));
    assert_eq!(Arc::strong_count(&seen), 1, "what ran once is dropped");
    d.mem_free(x).unwrap();
}

fn reading<S: Subject>(s: &S) {
    let (d, x) = (s.device(), plain(s.device()));
    let (st, gate) = (stream(d), d.gate_create().unwrap());
    d.launch(st, Kernel::Wait { gate }).unwrap();
    d.launch(st, set(x, 77)).unwrap();
    std::thread::scope(|scope| {
        let reading = (S::REAL).then(|| scope.spawn(|| word(d, st, x)));
        d.gate_open(gate).unwrap();
        assert_eq!(reading.map_or_else(|| word(d, st, x), |r| r.join().unwrap()), 77);
    });
    d.read(st, x, &mut []).unwrap();
    d.mem_free(x).unwrap();
}

fn modes<S: Subject>(s: &S) {
    use gpupool_device::CaptureMode::{Global, Relaxed, ThreadLocal};
    let d = s.device();
    assert_eq!(d.exchange_capture_mode(Relaxed).unwrap(), Global);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(d.exchange_capture_mode(ThreadLocal).unwrap(), Global, "a new thread's"));
    });
    assert_eq!(d.exchange_capture_mode(ThreadLocal).unwrap(), Relaxed);
    assert_eq!(d.exchange_capture_mode(Global).unwrap(), ThreadLocal);
}

fn device_wide<S: Subject>(s: &S) {
    let d = s.device();
    let streams: Vec<_> = (0..4).map(|_| stream(d)).collect();
    let x = plain(d);
    for (i, st) in streams.iter().enumerate() {
        d.launch(*st, set(x.offset(i as u64 * 4), 1)).unwrap();
    }
    d.device_synchronize().unwrap();
    assert!(streams.iter().all(|st| s.stream_query(*st).unwrap()));
    d.mem_free(x).unwrap();
}

//! What is told through `tracing`, and at which level: nothing on a hit, segments and captures at DEBUG, running out of memory at WARN.

use std::fmt::Write;
use std::sync::{Arc, Mutex};

use gpupool_allocator::{Allocator, Config, Policy};
use gpupool_device::{StreamKind, Workbench};
use gpupool_graph_capture::{CaptureOptions, Captures};
use gpupool_sim_device::{SimConfig, SimDevice};
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

const MIB: u64 = 1 << 20;

/// Keeps every event: its level, where it comes from, and its text with all fields.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<(Level, String, String)>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

impl Subscriber for Listener {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let (level, target) = (*event.metadata().level(), event.metadata().target().to_owned());
        self.0.lock().unwrap().push((level, target, text.0));
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn events_come_at_the_documented_levels_and_none_on_a_hit() {
    let device = Arc::new(SimDevice::new(SimConfig::default().with_capacity(100 * MIB)));
    let allocator =
        Allocator::with_registry(Arc::clone(&device), Config::new(Policy::Segments), Arc::default()).unwrap();
    let stream = allocator.register_stream(device.stream_create(StreamKind::NonBlocking).unwrap());
    let captures = Captures::new(&allocator);
    let listener = Listener::default();
    let taken = || std::mem::take(&mut *listener.0.lock().unwrap());
    let levels = |events: &[(Level, String, String)], words: &str| {
        events.iter().filter(|(_, _, text)| text.contains(words)).map(|(level, ..)| *level).collect::<Vec<_>>()
    };
    tracing::subscriber::with_default(listener.clone(), || {
        let block = allocator.alloc(MIB, &stream).unwrap();
        assert_eq!(levels(&taken(), "a segment was taken"), [Level::DEBUG]);
        drop(block);
        for _ in 0..100 {
            drop(allocator.alloc(MIB, &stream).unwrap());
        }
        assert_eq!(taken(), []);
        let capture = captures.begin(&stream, CaptureOptions::new()).unwrap();
        drop(allocator.alloc(MIB, &stream).unwrap());
        let graph = capture.end().unwrap();
        let events = taken();
        for words in ["a capture began", "a capture became a graph"] {
            assert_eq!(levels(&events, words), [Level::DEBUG], "{events:?}");
        }
        assert_eq!(levels(&events, "a capture recorded nothing"), [Level::WARN]);
        drop(graph);
        allocator.empty_cache().unwrap();
        assert!(levels(&taken(), "a segment was given back").iter().all(|level| *level == Level::DEBUG));
        allocator.alloc(200 * MIB, &stream).unwrap_err();
        let events = taken();
        assert_eq!(levels(&events, "out of memory"), [Level::WARN], "{events:?}");
        assert!(events.iter().all(|(_, target, _)| target.starts_with("gpupool_")), "{events:?}");
    });
}

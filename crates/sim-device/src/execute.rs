//! Running one piece of work.

use crate::state::State;
use crate::streams::StreamId;
use crate::work::Work;

impl State {
    /// Completes the marker at a stream's head.
    pub(crate) fn execute_marker(&mut self, id: StreamId) {
        let Some(op) = self.streams.pop(id) else { return };
        let Some(stream) = self.streams.get_mut(id) else { return };
        stream.clock.join(&op.host);
        stream.time = stream.time.max(op.at);
        match op.work {
            Work::Record(record) => record.finish(stream.clock.clone(), stream.time),
            Work::Wait(record) => {
                if let Some(done) = record.done() {
                    stream.clock.join(&done.clock);
                    stream.time = stream.time.max(done.time);
                }
            }
            Work::Hold(_) => stream.time = stream.time.max(self.time.now()),
        }
        self.streams.bury(id);
    }
}

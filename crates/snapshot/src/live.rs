//! A running process's figures, for whoever may look: a Unix socket that the embedder opens and only its owner can read.
//!
//! Whoever connects gets the figures once, in Prometheus's text format, and the end. Nothing that is sent is read.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use gpupool_allocator::Stats;

use crate::prometheus::prometheus;

/// Where figures come from: a device's ordinal and its allocator's statistics, or `None` once there is nothing more to tell. Called on the
/// socket's own thread.
pub type StatsSource = dyn Fn() -> Option<(u32, Stats)> + Send + Sync;

/// Whoever does not take what is written to it for so long is given up.
const PATIENCE: Duration = Duration::from_secs(2);
/// No process's figures are longer.
const LONGEST: u64 = 64 << 20;

/// A socket that tells figures. Dropping it closes it and removes its file.
#[derive(Debug)]
pub struct Live {
    path: PathBuf,
    /// Tells our socket from one that somebody else has put in its place.
    file: Option<(u64, u64)>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Live {
    /// Opens a socket at `path` that only the owner of this process can connect to, from the first moment on. A socket that is left there by
    /// a process that is gone is replaced.
    ///
    /// # Errors
    ///
    /// The system's; `AddrInUse` if someone listens there, `AlreadyExists` for a file of another kind.
    pub fn serve(path: &Path, source: Arc<StatsSource>) -> io::Result<Self> {
        if let Ok(there) = fs::symlink_metadata(path) {
            if !there.file_type().is_socket() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if UnixStream::connect(path).is_ok() {
                return Err(io::ErrorKind::AddrInUse.into());
            }
        }
        let listener = bind_private(path)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("gpupool live".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                if let Ok(stream) = stream {
                    tell(stream, &*source);
                }
            }
        })?;
        Ok(Self { path: path.to_owned(), file: identity(path), stop, thread: Some(thread) })
    }
}

/// Device and number of the file at a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Binds in a folder of its own that nobody else may enter, restricts the socket, and only then moves it to where it belongs.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut folder = name.to_owned();
    folder.push(format!(".{}", std::process::id()));
    let folder = path.with_file_name(folder);
    fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let inside = folder.join("s");
    let bound = UnixListener::bind(&inside).and_then(|listener| {
        fs::set_permissions(&inside, fs::Permissions::from_mode(0o600))?;
        fs::rename(&inside, path)?;
        Ok(listener)
    });
    if bound.is_err() {
        let _gone = fs::remove_file(&inside);
    }
    let _gone = fs::remove_dir(&folder);
    bound
}

fn tell(mut stream: UnixStream, source: &StatsSource) {
    let text = source().map_or_else(|| "# over\n".to_owned(), |(device, stats)| prometheus(&stats, device));
    // Whoever hangs up early has seen enough.
    let _ = stream.set_write_timeout(Some(PATIENCE)).and_then(|()| stream.write_all(text.as_bytes()));
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Our file may be gone, and another process's in its place, which is left alone. Then nobody can visit our thread any more: it
        // sleeps until the process ends.
        if self.file.is_none() || identity(&self.path) != self.file {
            return;
        }
        // A last visitor wakes the thread.
        let woken = UnixStream::connect(&self.path).is_ok();
        let _gone = fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

/// One reading of a figure: its name, its labels (as they stand in the text, without the braces), its value.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// The name.
    pub name: String,
    /// The labels.
    pub labels: String,
    /// The value.
    pub value: f64,
}

/// Reads the figures of a process that [serves](Live::serve) them at `path`; `None` if it has nothing more to tell.
///
/// # Errors
///
/// The system's; `InvalidInput` for a file that is no socket, `InvalidData` for what is no such text.
pub fn read_live(path: &Path) -> io::Result<Option<Vec<Sample>>> {
    if !fs::metadata(path)?.file_type().is_socket() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    stream.take(LONGEST).read_to_string(&mut text)?;
    let mut samples = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let parsed = line.split_once('{').and_then(|(name, rest)| {
            let (labels, value) = rest.rsplit_once("} ")?;
            Some(Sample { name: name.to_owned(), labels: labels.to_owned(), value: value.parse().ok()? })
        });
        samples
            .push(parsed.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no figure: {line:.60}")))?);
    }
    Ok((!samples.is_empty()).then_some(samples))
}

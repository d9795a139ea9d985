//! What the environment says.

use gpupool::Config;
use gpupool::config::ConfigError;

/// How the interposer works in this process.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `GPUPOOL_CONF`, as [`Config::parse_settings`] reads it.
    pub(crate) config: Config,
    /// `GPUPOOL_GRAPH_POOL`: `own` (default) or `shared`.
    pub(crate) one_graph_pool: bool,
    /// `GPUPOOL_LIBRARIES`: whether the CUDA runtime and libraries on it are `served` (default), or left to the `driver`.
    pub(crate) libraries: bool,
    /// `GPUPOOL_LOG`: a line on standard error when a device is first used and when the process ends.
    pub(crate) log: bool,
    /// `GPUPOOL_SNAPSHOT`: where a snapshot is written when the process ends; `{device}` in it becomes the ordinal.
    pub(crate) snapshot: Option<String>,
    /// `GPUPOOL_SNAPSHOT_SIGNAL`: the number of a signal on which it is written, too.
    pub(crate) signal: Option<i32>,
}

/// A variable says what cannot be.
#[derive(Debug)]
pub(crate) enum Wrong {
    Config(ConfigError),
    Value { variable: &'static str, value: String, expected: &'static str },
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config(error) => write!(f, "GPUPOOL_CONF: {error}"),
            Self::Value { variable, value, expected } => write!(f, "{variable}={value}: expected {expected}"),
        }
    }
}

impl Settings {
    /// Reads the variables that `lookup` knows.
    pub(crate) fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Wrong> {
        let config = Config::parse_settings(&lookup("GPUPOOL_CONF").unwrap_or_default()).map_err(Wrong::Config)?;
        let wrong = |variable, value: String, expected| Err(Wrong::Value { variable, value, expected });
        let one_graph_pool = match lookup("GPUPOOL_GRAPH_POOL").as_deref() {
            None | Some("" | "own") => false,
            Some("shared") => true,
            Some(other) => return wrong("GPUPOOL_GRAPH_POOL", other.to_owned(), "own or shared"),
        };
        let libraries = match lookup("GPUPOOL_LIBRARIES").as_deref() {
            None | Some("" | "served") => true,
            Some("driver") => false,
            Some(other) => return wrong("GPUPOOL_LIBRARIES", other.to_owned(), "served or driver"),
        };
        let log = match lookup("GPUPOOL_LOG").as_deref() {
            None | Some("" | "off" | "0") => false,
            Some("on" | "1") => true,
            Some(other) => return wrong("GPUPOOL_LOG", other.to_owned(), "on or off"),
        };
        let signal = match lookup("GPUPOOL_SNAPSHOT_SIGNAL") {
            None => None,
            Some(value) => match value.parse() {
                Ok(number @ 1..=64) => Some(number),
                _ => return wrong("GPUPOOL_SNAPSHOT_SIGNAL", value, "a signal's number, such as 10 (SIGUSR1)"),
            },
        };
        let snapshot = lookup("GPUPOOL_SNAPSHOT").filter(|path| !path.is_empty());
        if signal.is_some() && snapshot.is_none() {
            return wrong("GPUPOOL_SNAPSHOT", String::new(), "a path, since GPUPOOL_SNAPSHOT_SIGNAL is set");
        }
        Ok(Self { config, one_graph_pool, libraries, log, snapshot, signal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, String> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Settings::read(find).map_err(|wrong| wrong.to_string())
    }

    #[test]
    fn nothing_set_is_the_defaults() {
        let s = read(&[]).unwrap();
        assert_eq!((s.one_graph_pool, s.libraries, s.log, s.snapshot, s.signal), (false, true, false, None, None));
    }

    #[test]
    fn every_variable_counts() {
        let s = read(&[
            ("GPUPOOL_CONF", "memory_limit=1GiB"),
            ("GPUPOOL_GRAPH_POOL", "shared"),
            ("GPUPOOL_LIBRARIES", "driver"),
            ("GPUPOOL_LOG", "1"),
            ("GPUPOOL_SNAPSHOT", "/tmp/x"),
            ("GPUPOOL_SNAPSHOT_SIGNAL", "10"),
        ])
        .unwrap();
        assert_eq!(s.config.memory_limit(), Some(1 << 30));
        assert_eq!((s.one_graph_pool, s.libraries, s.log), (true, false, true));
        assert_eq!((s.snapshot.as_deref(), s.signal), (Some("/tmp/x"), Some(10)));
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (variable, value) in [
            ("GPUPOOL_CONF", "nonsense"),
            ("GPUPOOL_GRAPH_POOL", "mine"),
            ("GPUPOOL_LIBRARIES", "all"),
            ("GPUPOOL_LOG", "loud"),
            ("GPUPOOL_SNAPSHOT_SIGNAL", "USR1"),
            ("GPUPOOL_SNAPSHOT_SIGNAL", "0"),
        ] {
            let error = read(&[(variable, value)]).unwrap_err();
            assert!(error.contains(variable) && error.contains(value), "{error}");
        }
        assert!(read(&[("GPUPOOL_SNAPSHOT_SIGNAL", "10")]).unwrap_err().contains("GPUPOOL_SNAPSHOT="));
    }
}

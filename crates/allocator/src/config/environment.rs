//! Configuration from the environment, as PyTorch reads it.

use super::{AcceptedOption, AcceptedWhy, Config, ConfigError, Policy, excerpt};

/// Where the options are looked for. The first variable that is set is the only one that is read, even when it is empty.
const OPTIONS: [&str; 3] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// Set to `1`, either one turns caching off.
const NO_CACHING: [&str; 2] = ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"];

impl Config {
    /// What PyTorch's variables in this process's environment say, on top of the defaults of `policy`.
    ///
    /// The options are the value of the first variable set of `PYTORCH_CUDA_ALLOC_CONF`, `PYTORCH_HIP_ALLOC_CONF` and
    /// `PYTORCH_ALLOC_CONF`, in this order, and that variable alone. `PYTORCH_NO_CUDA_MEMORY_CACHING` or
    /// `PYTORCH_NO_HIP_MEMORY_CACHING` set to `1` turns [`caching`](Self::caching) off; `0` and nothing do not, and any other value
    /// is ignored, as in PyTorch, and listed in [`accepted`](Self::accepted).
    ///
    /// # Errors
    ///
    /// As [`parse_pytorch`](Self::parse_pytorch), in a [`ConfigError::Environment`] that names the variable.
    pub fn from_environment(policy: Policy) -> Result<Self, ConfigError> {
        // What is not Unicode becomes U+FFFD, which no option's name or value contains.
        Self::from_variables(policy, |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// As [`from_environment`](Self::from_environment), but `lookup` says what a variable holds, and `None` when it is not set.
    ///
    /// # Errors
    ///
    /// As [`from_environment`](Self::from_environment).
    pub fn from_variables(
        policy: Policy,
        mut lookup: impl FnMut(&'static str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let mut config = match OPTIONS.into_iter().find_map(|variable| Some((variable, lookup(variable)?))) {
            Some((variable, text)) => Self::parse_pytorch(&text, policy)
                .map_err(|error| ConfigError::Environment { variable, error: Box::new(error) })?,
            None => Self::new(policy),
        };
        for name in NO_CACHING {
            match lookup(name).as_deref() {
                None | Some("0") => {}
                Some("1") => config.caching = false,
                Some(value) => {
                    let (value, why) = (excerpt(value), AcceptedWhy::Ignored);
                    config.accepted.push(AcceptedOption { name, value, why, place: None });
                }
            }
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_variables(Policy::Torch215, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const SPLIT: [&str; 3] = ["max_split_size_mb:21", "max_split_size_mb:22", "max_split_size_mb:23"];

    #[test]
    fn the_first_variable_wins_whole() {
        let all: Vec<_> = OPTIONS.into_iter().zip(SPLIT).collect();
        for first in 0..3 {
            let config = config(&all[first..]).unwrap();
            assert_eq!(config.max_split_size(), Some((21 + first as u64) << 20));
            assert_eq!(config.pytorch_options(), SPLIT[first]);
        }
        assert_eq!(config(&[]).unwrap(), Config::new(Policy::Torch215));
    }

    #[test]
    fn an_empty_variable_is_set() {
        let config = config(&[("PYTORCH_CUDA_ALLOC_CONF", ""), ("PYTORCH_ALLOC_CONF", SPLIT[0])]).unwrap();
        assert_eq!(config, Config::new(Policy::Torch215));
    }

    #[test]
    fn later_variables_are_not_even_read() {
        let config = config(&[("PYTORCH_CUDA_ALLOC_CONF", SPLIT[0]), ("PYTORCH_ALLOC_CONF", "nonsense")]).unwrap();
        assert_eq!(config.max_split_size(), Some(21 << 20));
    }

    #[test]
    fn errors_name_the_variable() {
        let error = config(&[("PYTORCH_ALLOC_CONF", "max_split_size_mb:1")]).unwrap_err();
        assert!(matches!(error, ConfigError::Environment { variable: "PYTORCH_ALLOC_CONF", .. }));
        assert!(error.to_string().starts_with("PYTORCH_ALLOC_CONF: `max_split_size_mb` cannot be `1`"), "{error}");
    }

    #[test]
    fn caching_is_turned_off_by_1_only() {
        for name in NO_CACHING {
            assert!(!config(&[(name, "1")]).unwrap().caching());
            assert!(config(&[(name, "0")]).unwrap().accepted().is_empty());
            for value in ["", "True", "2", "é"] {
                let config = config(&[(name, value)]).unwrap();
                assert!(config.caching());
                let [accepted] = config.accepted() else { panic!("{:?}", config.accepted()) };
                assert_eq!((accepted.name, &*accepted.value, accepted.why), (name, value, AcceptedWhy::Ignored));
            }
        }
    }

    #[test]
    fn the_process_environment_is_read() {
        // Whatever it holds: this must not panic.
        let _ = Config::from_environment(Policy::Segments);
    }
}

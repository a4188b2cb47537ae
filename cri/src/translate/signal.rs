//! `Signal` of the CRI and the names that records use: `SIGTERM`, `SIGRTMIN+3`, `SIGRTMAX-1`.

use crate::error::{Error, Result};
use crate::runtime::v1::Signal;

/// The record's name of a signal; empty for the runtime's default.
pub(crate) fn from_proto(field: &str, value: i32) -> Result<String> {
    let unknown = |_| Error::invalid(field, format!("{value} is no known signal"));
    let name = Signal::try_from(value).map_err(unknown)?.as_str_name();
    if name == Signal::RuntimeDefault.as_str_name() {
        return Ok(String::new());
    }
    let name = name.strip_prefix("SIGNAL_").unwrap_or(name);
    Ok(name.replace("RTMINPLUS", "RTMIN+").replace("RTMAXMINUS", "RTMAX-"))
}

/// The enum value of a name; the default for an empty or unknown one.
pub(crate) fn to_proto(name: &str) -> i32 {
    let name = name.replace("RTMIN+", "RTMINPLUS").replace("RTMAX-", "RTMAXMINUS");
    Signal::from_str_name(&format!("SIGNAL_{name}"))
        .unwrap_or_default()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_returns() {
        for value in 0..=65 {
            let name = from_proto("config.stop_signal", value).unwrap();
            assert_eq!(to_proto(&name), value, "{name}");
        }
        assert_eq!(from_proto("", 23).unwrap(), "SIGTERM");
        assert_eq!(from_proto("", 38).unwrap(), "SIGRTMIN+3");
        assert_eq!(from_proto("", 64).unwrap(), "SIGRTMAX-1");
    }

    #[test]
    fn unknown_value_names_the_field() {
        let error = from_proto("config.stop_signal", 66).unwrap_err().to_string();
        assert_eq!(error, "config.stop_signal: 66 is no known signal");
    }
}

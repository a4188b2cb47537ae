//! How a reference would be reached, for people: the endpoints in order, and where each setting was made.

use std::path::PathBuf;

use serde::Serialize;
use state::Reference;

use super::Registry;
use super::hosts::{Ignored, Role, Setting};

/// How a reference would be reached.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    pub reference: String,
    /// The host of the reference.
    pub registry: String,
    /// Roots in which directories are looked for, in order.
    pub roots: Vec<PathBuf>,
    /// The directory that decided; none: nothing is configured.
    pub directory: Option<PathBuf>,
    pub endpoints: Vec<EndpointSeen>,
    pub ignored: Vec<Ignored>,
}

/// One endpoint as people see it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSeen {
    pub url: String,
    pub role: Role,
    pub settings: Vec<Setting>,
}

impl Registry {
    /// The endpoints for a reference in order, and where each setting came from. Reads the files anew; asks nobody.
    pub fn explain(&self, reference: &Reference) -> Explanation {
        let hosts = self.look_up(reference);
        let endpoints = hosts.endpoints.into_iter().map(|endpoint| EndpointSeen {
            url: endpoint.url.to_string(),
            role: endpoint.role,
            settings: endpoint.settings,
        });
        Explanation {
            reference: reference.to_string(),
            registry: reference.host().to_owned(),
            roots: self.hosts_roots(),
            directory: hosts.directory,
            endpoints: endpoints.collect(),
            ignored: hosts.ignored,
        }
    }
}

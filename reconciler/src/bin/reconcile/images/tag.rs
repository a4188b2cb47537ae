//! `reconcile images tag`: another name for an image that is here.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use cri::records::v1;
use state::image::{ImageKind, ImageSource, ImageSpec};
use state::resource::Kind as _;
use state::{Meta, New, Reference};

use super::find;
use crate::apply;
use crate::client::Client;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::verdict::Verdict;

/// Everything is here already.
const LOOK: Duration = Duration::from_secs(60);

#[derive(Args)]
pub struct Tag {
    /// Name or id of an image that is here
    source: String,
    /// The further name
    target: String,
}

pub async fn run(global: &Global, args: &Tag) -> Result<ExitCode> {
    let target = Reference::parse(&args.target, "TARGET")?;
    if target.digest().is_some() {
        bail!("TARGET {target} is a digest; only a tag can be given");
    }
    let session = Session::open(global, Need::Act).await?;
    let tagged = tag(&session.client, &args.source, &target).await;
    session.close().await?;
    tagged.map(|()| ExitCode::SUCCESS)
}

async fn tag(client: &Client, source: &str, target: &Reference) -> Result<()> {
    let found = find::one(client, source).await?;
    let meta = Meta {
        name: target.to_string(),
        ..Meta::default()
    };
    let spec = ImageSpec {
        source: ImageSource::Archive {
            manifest_digest: found.digest,
        },
        ..ImageSpec::default()
    };
    let document = v1::Document {
        kind: ImageKind::KIND.to_owned(),
        json: state::yaml::Record::Image(New { meta, spec }).to_json()?,
    };
    for one in &client.apply(vec![document], false).await? {
        match apply::settled(client, one, LOOK).await? {
            Verdict::Met => {}
            Verdict::Failed(why) | Verdict::Waiting(why) => bail!("{target}: {why}"),
        }
    }
    Ok(())
}

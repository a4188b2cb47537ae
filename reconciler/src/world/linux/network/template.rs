//! A CNI configuration made from a template, for nodes that nobody else gives one: the administrator writes the
//! plugins, the kubelet tells the pods' CIDRs.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::json;

use super::Cidr;
use super::conflist::Conflist;
use super::error::{Error, Result, system};

const MAX_BYTES: u64 = 1 << 20;
/// Where the result lies. Files that sort before it count instead, as always.
const NAME: &str = "10-reconcile.conflist";

/// Fills the template and puts the result into the CNI directory, by rename.
///
/// `{{.PodCIDR}}` is the first CIDR, `{{.PodCIDRRanges}}` the JSON list of all of them as host-local's `ranges`, and
/// `{{.Routes}}` that of a default route for each family, as its `routes`.
pub fn render(template: &Path, cidrs: &[Cidr], dir: &Path) -> Result<()> {
    let size = fs::metadata(template)
        .map_err(system("read", template.display()))?
        .len();
    if size > MAX_BYTES {
        return Err(Error::PodCidr(format!(
            "{}: {size} bytes are no template",
            template.display()
        )));
    }
    let text = fs::read_to_string(template).map_err(system("read", template.display()))?;
    let filled = fill(&text, cidrs).map_err(|why| Error::PodCidr(format!("{}: {why}", template.display())))?;
    let target = dir.join(NAME);
    if fs::read_to_string(&target).is_ok_and(|have| have == filled) {
        return Ok(());
    }
    fs::create_dir_all(dir).map_err(system("make", dir.display()))?;
    let new = dir.join(format!(".{NAME}.new"));
    let written = fs::File::create(&new).and_then(|mut file| {
        file.write_all(filled.as_bytes())?;
        file.sync_data()
    });
    written
        .and_then(|()| fs::rename(&new, &target))
        .map_err(system("write", target.display()))?;
    tracing::info!(file = %target.display(), "CNI configuration made from its template");
    Ok(())
}

fn fill(text: &str, cidrs: &[Cidr]) -> std::result::Result<String, String> {
    let first = cidrs.first().ok_or("no pod CIDR")?;
    let ranges: Vec<_> = cidrs
        .iter()
        .map(|cidr| json!([{ "subnet": cidr.to_string() }]))
        .collect();
    let has = |six: bool| cidrs.iter().any(|cidr| cidr.ip.is_ipv6() == six);
    let routes = [(false, "0.0.0.0/0"), (true, "::/0")];
    let routes = routes.into_iter().filter(|(six, _)| has(*six));
    let routes: Vec<_> = routes.map(|(_, dst)| json!({ "dst": dst })).collect();
    let filled = text
        .replace("{{.PodCIDR}}", &first.to_string())
        .replace("{{.PodCIDRRanges}}", &json!(ranges).to_string())
        .replace("{{.Routes}}", &json!(routes).to_string());
    if let Some(at) = filled.find("{{") {
        let unknown: String = filled[at..].chars().take(40).collect();
        return Err(format!(
            "{unknown:?}: only {{{{.PodCIDR}}}}, {{{{.PodCIDRRanges}}}} and {{{{.Routes}}}} are filled in"
        ));
    }
    let value = serde_json::from_str(&filled).map_err(|e| format!("filled in, it is not JSON: {e}"))?;
    Conflist::parse(value)?;
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_filled_or_the_mistake_named() {
        let ipam = r#"{"type":"host-local","subnet":"{{.PodCIDR}}","ranges":{{.PodCIDRRanges}},"routes":{{.Routes}}}"#;
        let list =
            |ipam: &str| format!(r#"{{"cniVersion":"1.0.0","name":"n","plugins":[{{"type":"ptp","ipam":{ipam}}}]}}"#);
        let cidrs = ["10.1.0.0/24", "fd00::/64"].map(|text| text.parse().unwrap());
        let filled: serde_json::Value = serde_json::from_str(&fill(&list(ipam), &cidrs).unwrap()).unwrap();
        let ipam = &filled["plugins"][0]["ipam"];
        assert_eq!(ipam["subnet"], "10.1.0.0/24");
        assert_eq!(
            ipam["ranges"],
            json!([[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]])
        );
        assert_eq!(ipam["routes"], json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]));
        for (text, words) in [("{{range .X}}", "range .X"), ("{", "not JSON"), ("{}", "name")] {
            let error = fill(text, &cidrs).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}

//! Metrics of pods: descriptors, samples, and the same samples in Prometheus' text.

use std::collections::BTreeMap;
use std::fmt::Write;

use state::Kind;
use state::container::ContainerKind;
use state::debt::DebtKind;
use state::image::ImageKind;
use state::meter::escaped;
use state::pod::PodKind;
use state::sandbox::{SandboxKind, SandboxPhase};
use state::usage::Ask;

use super::{stats, v1};
use crate::error::Result;
use crate::images::Catalog;
use crate::services::Services;
use crate::translate::metrics::{self, Subject};

/// What this node can sample; the same for as long as the daemon lives.
pub(super) async fn descriptors(services: &Services) -> Result<v1::ListMetricDescriptorsResponse> {
    let answer = services.store.ask(Ask::default()).await?;
    Ok(v1::ListMetricDescriptorsResponse {
        descriptors: metrics::descriptors(&answer.able),
    })
}

pub(super) async fn sandboxes(services: &Services) -> Result<Vec<v1::PodSandboxMetrics>> {
    let mut all = services.sandboxes();
    all.retain(|sandbox| sandbox.status.phase == SandboxPhase::Ready);
    let (all, answer) = stats::ask(services, all, true).await?;
    let catalog = Catalog::read(&services.store);
    let mut pods = Vec::with_capacity(all.len());
    for (sandbox, containers) in &all {
        let Some(usage) = answer.sandboxes.get(sandbox.uid()) else {
            continue;
        };
        let container_metrics = containers.iter().filter_map(|container| {
            let usage = answer.containers.get(container.uid())?;
            let names = catalog.names(&container.spec.image.id);
            let image = names.tag.unwrap_or_else(|| container.spec.image.requested.clone());
            let subject = Subject::container(sandbox, container, usage, image);
            Some(v1::ContainerMetrics {
                container_id: container.meta.uid.clone(),
                metrics: metrics::container(&answer.able, &subject, container, usage),
            })
        });
        pods.push(v1::PodSandboxMetrics {
            pod_sandbox_id: sandbox.meta.uid.clone(),
            metrics: metrics::sandbox(&Subject::sandbox(sandbox), usage),
            container_metrics: container_metrics.collect(),
        });
    }
    Ok(pods)
}

impl Services {
    /// Everything for Prometheus, in its text format, version 0.0.4: what this program counts of itself, then the
    /// metrics of ListPodSandboxMetrics. Samples the node.
    pub async fn prometheus(&self) -> Result<String> {
        let meter = self.store.meter();
        for (kind, number) in [
            (PodKind::KIND, self.store.list::<PodKind>().len()),
            (SandboxKind::KIND, self.store.list::<SandboxKind>().len()),
            (ContainerKind::KIND, self.store.list::<ContainerKind>().len()),
            (ImageKind::KIND, self.store.list::<ImageKind>().len()),
            (DebtKind::KIND, self.store.list::<DebtKind>().len()),
        ] {
            meter.set("reconcile_records", &[("kind", kind)], number as f64);
        }
        let mut text = meter.text();
        text.push_str(&self.pod_metrics().await?);
        Ok(text)
    }

    async fn pod_metrics(&self) -> Result<String> {
        let descriptors = descriptors(self).await?.descriptors;
        let pods = sandboxes(self).await?;
        let all = pods.iter().flat_map(|pod| {
            let containers = pod.container_metrics.iter().flat_map(|c| &c.metrics);
            pod.metrics.iter().chain(containers)
        });
        let mut families: BTreeMap<&str, Vec<&v1::Metric>> = BTreeMap::new();
        for metric in all {
            families.entry(&metric.name).or_default().push(metric);
        }
        let mut text = String::new();
        for descriptor in &descriptors {
            if let Some(samples) = families.get(descriptor.name.as_str()) {
                family(&mut text, descriptor, samples);
            }
        }
        Ok(text)
    }
}

fn family(text: &mut String, descriptor: &v1::MetricDescriptor, samples: &[&v1::Metric]) {
    let name = &descriptor.name;
    let kind = match samples.first().map(|sample| sample.metric_type()) {
        Some(v1::MetricType::Gauge) => "gauge",
        _ => "counter",
    };
    // Writing to a String does not fail.
    let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {kind}", descriptor.help);
    for sample in samples {
        let labels = descriptor.label_keys.iter().zip(&sample.label_values);
        let labels: Vec<_> = labels
            .map(|(key, value)| format!("{key}=\"{}\"", escaped(value)))
            .collect();
        let value = sample.value.as_ref().map_or(0, |value| value.value);
        let _ = writeln!(text, "{name}{{{}}} {value}", labels.join(","));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_written_with_escaped_labels() {
        let descriptor = v1::MetricDescriptor {
            name: "container_x_total".into(),
            help: "Help.".into(),
            label_keys: vec!["id".into(), "pod".into()],
        };
        let sample = v1::Metric {
            name: descriptor.name.clone(),
            label_values: vec!["/a\"b\\".into(), "x\ny".into()],
            value: Some(v1::UInt64Value { value: 7 }),
            ..v1::Metric::default()
        };
        let mut text = String::new();
        family(&mut text, &descriptor, &[&sample]);
        let lines = [
            "# HELP container_x_total Help.",
            "# TYPE container_x_total counter",
            r#"container_x_total{id="/a\"b\\",pod="x\ny"} 7"#,
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), lines);
    }
}

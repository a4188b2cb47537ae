//! Documents as registries and enemies write them.

use serde_json::{Value, json};

use super::*;

fn put(content: &Content, media_type: MediaType, document: &Value) -> Descriptor {
    content
        .ingest_bytes(media_type, document.to_string().as_bytes())
        .unwrap()
}

#[test]
fn an_image_needs_the_indexes_that_lead_to_it() {
    let root = tempfile::tempdir().unwrap();
    let content = Content::open(root.path()).unwrap();
    let config = json!({
        "architecture": Arch::default(), "os": "linux", "rootfs": { "type": "layers", "diff_ids": [] },
    });
    let config = put(&content, MediaType::ImageConfig, &config);
    let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [] });
    let manifest = put(&content, MediaType::ImageManifest, &manifest);
    let index = |inner: &Descriptor| json!({ "schemaVersion": 2, "manifests": [inner] });
    let inner = put(&content, MediaType::ImageIndex, &index(&manifest));
    let outer = put(&content, MediaType::ImageIndex, &index(&inner));
    let image = by_digest(&content, outer.digest().as_ref()).unwrap();
    let needs: Vec<String> = image.needs().collect();
    for blob in [&config, &manifest, &inner, &outer] {
        assert!(needs.contains(&blob.digest().to_string()), "{blob:?}");
    }
    assert!(image.blobs().all(|blob| !is_index(blob.media_type().as_ref())));
    let twice = put(&content, MediaType::ImageIndex, &index(&outer));
    let thrice = put(&content, MediaType::ImageIndex, &index(&twice));
    let error = by_digest(&content, thrice.digest().as_ref()).unwrap_err();
    assert!(error.to_string().contains("nest deeper"), "{error}");
}

#[test]
fn documents_made_of_nothing_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let content = Content::open(root.path()).unwrap();
    let config = |steps: usize| {
        json!({
            "architecture": Arch::default(), "os": "linux", "rootfs": { "type": "layers", "diff_ids": [] },
            "history": vec![json!({}); steps],
        })
    };
    let image = |steps| {
        let config = put(&content, MediaType::ImageConfig, &config(steps));
        let manifest = json!({ "schemaVersion": 2, "config": config, "layers": [] });
        let manifest = put(&content, MediaType::ImageManifest, &manifest);
        load(&content, &manifest, &Platform::host())
    };
    assert!(image(5_000).is_ok());
    let error = image(2_000_000).unwrap_err();
    assert!(error.to_string().contains("entries"), "{error}");
    let manifests = json!({ "schemaVersion": 2, "manifests": vec![json!({}); 2_000_000] });
    let error = parse("x", None, manifests.to_string().as_bytes()).unwrap_err();
    assert!(error.to_string().contains("entries"), "{error}");
}

//! Generates servers and clients from `proto/` in Rust alone: no protoc is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = Path::new("proto");
    let files = ["runtime.v1.proto", "records.v1.proto"].map(|f| dir.join(f));
    for file in &files {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    let descriptors = protox::compile(&files, [dir])?;
    // Lists of thousands of labels are compared and printed: an ordered map keeps answers the same every time.
    tonic_prost_build::configure().btree_map(".").compile_fds(descriptors)?;
    Ok(())
}

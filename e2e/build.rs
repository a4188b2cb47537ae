//! Generates a client from the CRI's protocol file, in Rust alone: the tests share no code with what they test.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../cri/proto/runtime.v1.proto");
    let descriptors = protox::compile(["runtime.v1.proto"], ["../cri/proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .btree_map(".")
        .compile_fds(descriptors)?;
    Ok(())
}

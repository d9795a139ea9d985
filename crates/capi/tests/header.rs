//! The header that is checked in is the one that the sources say.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

#[test]
fn the_header_is_what_the_sources_say() {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(crate_dir.join("cbindgen.toml")).unwrap();
    let mut generated = Vec::new();
    cbindgen::Builder::new().with_crate(crate_dir).with_config(config).generate().unwrap().write(&mut generated);
    let generated = String::from_utf8(generated).unwrap();
    let path = crate_dir.join("include/gpupool.h");
    if std::env::var_os("GPUPOOL_WRITE_HEADER").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        generated == written,
        "include/gpupool.h is out of date: GPUPOOL_WRITE_HEADER=1 cargo test -p gpupool-capi --test header"
    );
    for function in ["gpupool_create", "gpupool_alloc", "gpupool_capture_begin", "gpupool_torch_malloc"] {
        assert!(generated.contains(function), "{function} is not exported");
    }
}

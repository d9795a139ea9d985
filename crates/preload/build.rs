//! Links the library against the driver by name, with no driver needed to build: an empty library stands in for it.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    let Some(folder) = std::env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    let (source, stub) = (folder.join("empty.c"), folder.join("libcuda.so.1"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let built = std::fs::write(&source, "").and_then(|()| {
        let mut compile = Command::new(&compiler);
        compile.args(["-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&stub).arg(&source).status()
    });
    if !built.is_ok_and(|status| status.success()) {
        println!("cargo:warning=no C compiler ({compiler}): the library will not bring the driver along");
        return;
    }
    for argument in ["-Wl,--no-as-needed", &stub.display().to_string(), "-Wl,-soname,libcuda.so"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}

//! A C program, built with the system's C compiler against the header and run on the simulated device.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo put the shared library: beside the folder of the test programs, or in it.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let folders = [deps, deps.parent().unwrap()];
    let found = folders.into_iter().find(|folder| folder.join("libgpupool_capi.so").exists());
    found.unwrap_or_else(|| panic!("libgpupool_capi.so is in none of {folders:?}")).to_owned()
}

fn c_compiler() -> Option<String> {
    let named = std::env::var("CC").ok();
    named
        .into_iter()
        .chain(["cc", "gcc", "clang"].map(String::from))
        .find(|compiler| Command::new(compiler).arg("--version").output().is_ok_and(|o| o.status.success()))
}

/// Builds a C program of `tests/c` and runs it; `None`, with the reason printed, where there is no compiler.
fn runs_well(name: &str, arguments: &[&Path]) -> Option<()> {
    if cfg!(not(target_os = "linux")) {
        println!("skipped: shared libraries have another name here");
        return None;
    }
    let Some(compiler) = c_compiler() else {
        println!("skipped: no C compiler (tried $CC, cc, gcc, clang)");
        return None;
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = library_folder();
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("c_{name}"));
    let built = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-pthread"])
        .arg("-I")
        .arg(here.join("include"))
        .arg(here.join(format!("tests/c/{name}.c")))
        .arg("-o")
        .arg(&program)
        .arg(format!("-L{}", folder.display()))
        .arg("-lgpupool_capi")
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    // Cargo names folders where an older build of the library may lie.
    let ran = Command::new(&program).args(arguments).env("LD_LIBRARY_PATH", &folder).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{} {said}{}", ran.status, String::from_utf8_lossy(&ran.stderr));
    assert!(said.ends_with("all is well\n"), "{said}");
    Some(())
}

#[test]
fn a_c_program_uses_everything() {
    let snapshot = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("c_program.json");
    if runs_well("program", &[&snapshot]).is_none() {
        return;
    }
    // What it wrote is a snapshot that our own reader takes.
    let file = std::fs::File::open(&snapshot).unwrap();
    let read = gpupool::snapshot::Snapshot::read("c_program.json", file).unwrap();
    assert!(!read.segments.is_empty());
}

#[test]
fn a_c_program_that_does_everything_wrong_is_told_and_breaks_nothing() {
    runs_well("misuse", &[]);
}

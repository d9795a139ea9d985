//! The C++ shim and the Python module, without PyTorch: against a made-up one that records what is set.
#![allow(clippy::unwrap_used, clippy::panic)]
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

fn library_folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let folders = [deps, deps.parent().unwrap()];
    let found = folders.into_iter().find(|folder| folder.join("libgpupool_capi.so").exists());
    found.unwrap_or_else(|| panic!("libgpupool_capi.so is in none of {folders:?}")).to_owned()
}

/// The first of these programs that runs; else why the test is skipped.
fn tool(names: &[&str]) -> Option<String> {
    let runs = |name: &&&str| Command::new(**name).arg("--version").output().is_ok_and(|o| o.status.success());
    let found = names.iter().find(runs).map(|name| (*name).to_owned());
    if found.is_none() {
        println!("skipped: none of {names:?} runs here");
    }
    found
}

fn well(output: &Output) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}{err}", output.status);
}

fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn the_shim_throws_what_pytorch_expects_and_keeps_its_filter() {
    let Some(compiler) = tool(&["c++", "g++", "clang++"]) else { return };
    let (folder, libraries) = (scratch("shim"), library_folder());
    let built = Command::new(compiler)
        .current_dir(&folder)
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror"])
        .args([format!("-I{HERE}/tests/python/made_up"), format!("{HERE}/tests/python/torch_like.cpp")])
        .args(["-o".into(), "torch_like".into(), format!("-L{}", libraries.display()), "-lgpupool_capi".into()])
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .output()
        .unwrap();
    well(&built);
    let ran = Command::new(folder.join("torch_like")).output().unwrap();
    well(&ran);
    assert_eq!(ran.stdout, b"all is well\n");
    let shim = std::fs::read_to_string(Path::new(HERE).join("python/shim.cpp")).unwrap();
    assert!(shim.lines().count() < 100);
}

#[test]
fn the_python_module_sets_every_hook_or_refuses() {
    let (Some(compiler), Some(python)) = (tool(&["g++", "clang++", "c++"]), tool(&["python3"])) else { return };
    let (folder, library) = (scratch("python"), library_folder().join("libgpupool_capi.so"));
    std::fs::write(folder.join("empty.cpp"), "").unwrap();
    let empty = Command::new(&compiler)
        .current_dir(&folder)
        .args(["-shared", "-fPIC", "empty.cpp", "-o", "libc10.so"])
        .output()
        .unwrap();
    well(&empty);
    let ran = Command::new(python)
        .arg(format!("{HERE}/tests/python/check.py"))
        .args([&library, &folder])
        .env("PYTHONPATH", format!("{HERE}/python:{HERE}/tests/python/made_up"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("MADE_UP_C10", &folder)
        .env("CXX", compiler)
        .output()
        .unwrap();
    well(&ran);
    assert_eq!(ran.stdout, b"all is well\n");
}

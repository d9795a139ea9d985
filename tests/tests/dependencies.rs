//! Which crate may know which, where `unsafe` may stand, and how modules are written: the rules of docs/design.md that no compiler
//! holds. Read from the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use gpupool_tests::rust_text::{code_only, files, lines_with_word, root, without_tests};

/// Longest module.
const LINES: usize = 700;

/// What each crate may name, by folder under `crates/`. What those know in turn is allowed too. A crate that is missing here is an
/// error: say what it may know first.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("device", &[]),
    ("sim-device", &["device"]),
    ("cuda-device", &["device", "kernels"]),
    ("allocator", &["device"]),
    ("graph-capture", &["allocator"]),
    ("snapshot", &["allocator", "graph-capture"]),
    ("replay", &["sim-device", "graph-capture", "snapshot"]),
    ("gpupool", &["graph-capture", "snapshot", "sim-device", "cuda-device", "replay"]),
    ("capi", &["gpupool", "cuda-device"]),
    ("preload", &["gpupool", "cuda-device"]),
    ("kernels", &[]),
];

/// Crates that may know anything: nothing knows them.
const KNOW_ANYTHING: &[&str] = &["cli", "tests", "benches", "fuzz"];

/// What a crate's own tests may name beyond that: those of the real device need `unsafe`, so they stand in its crate.
const TESTS_MAY_KNOW: &[(&str, &[&str])] = &[("cuda-device", &["allocator", "graph-capture", "tests"])];

/// Dependencies that `gpupool` has behind a feature.
const OPTIONAL_IN_GPUPOOL: &[&str] = &["sim-device", "cuda-device", "replay"];

/// Where `unsafe` may stand.
const UNSAFE: &[&str] = &["crates/cuda-device", "crates/capi", "crates/preload"];

/// A crate's name without the prefix that all of them have.
fn short(name: &str) -> &str {
    if name == "gpupool" { name } else { name.strip_prefix("gpupool-").unwrap_or(name) }
}

fn everything_known(name: &str) -> BTreeSet<&'static str> {
    let table: BTreeMap<_, _> = MAY_KNOW.iter().copied().collect();
    let mut known = BTreeSet::new();
    let mut open: Vec<&str> = table[name].to_vec();
    while let Some(next) = open.pop() {
        if known.insert(table.get_key_value(next).map(|(k, _)| *k).unwrap()) {
            open.extend(table[next]);
        }
    }
    known
}

/// One dependency of a manifest.
struct Dependency {
    name: String,
    optional: bool,
    /// For tests and examples.
    dev: bool,
}

/// The dependencies of a manifest on crates of this project: plain, for tests, for build scripts, for some target only. By the name
/// of the package, whatever it is called here.
fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut out: Vec<Dependency> = Vec::new();
    let mut section = String::new();
    for line in manifest.lines().map(|l| l.split('#').next().unwrap().trim()) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']').trim_matches('[').to_owned();
            // `[dependencies.name]`
            if let Some((_, name)) = section.split_once("dependencies.") {
                out.push(Dependency { name: name.to_owned(), optional: false, dev: section.contains("dev-") });
            }
            continue;
        }
        let inside = section.ends_with("dependencies");
        let of_one = section.contains("dependencies.");
        let Some((key, value)) = line.split_once('=').filter(|_| inside || of_one) else { continue };
        let package = |text: &str| {
            let (_, rest) = text.split_once("package")?;
            Some(rest.split('"').nth(1)?.to_owned())
        };
        let optional = line.replace(' ', "").contains("optional=true");
        if inside {
            let name = key.trim().split('.').next().unwrap().trim().to_owned();
            let dev = section.contains("dev-");
            out.push(Dependency { name: package(value).unwrap_or(name), optional, dev });
        } else if let Some(last) = out.last_mut() {
            last.optional |= optional;
            if key.trim() == "package" {
                last.name = value.trim().trim_matches('"').to_owned();
            }
        }
    }
    out.retain(|d| d.name.starts_with("gpupool"));
    out
}

fn name_in(manifest: &str) -> String {
    let line = manifest.lines().find(|l| l.starts_with("name")).unwrap();
    line.split('"').nth(1).unwrap().to_owned()
}

#[test]
fn crates_know_only_what_they_may() {
    let mut seen = 0;
    for path in files(&root(), "Cargo.toml") {
        let manifest = std::fs::read_to_string(&path).unwrap();
        if !manifest.contains("[package]") {
            continue;
        }
        seen += 1;
        let full = name_in(&manifest);
        let name = short(&full);
        let example = name.starts_with("example") || path.components().any(|c| c.as_os_str() == "examples");
        if KNOW_ANYTHING.contains(&name) || example {
            continue;
        }
        let place = path.display();
        assert!(
            MAY_KNOW.iter().any(|(n, _)| *n == name),
            "{place}: crate {full} is not in the table of who may know whom"
        );
        let may = everything_known(name);
        for dependency in dependencies(&manifest) {
            let to = short(&dependency.name);
            if dependency.dev && TESTS_MAY_KNOW.iter().any(|(n, known)| *n == name && known.contains(&to)) {
                continue;
            }
            assert!(may.contains(to), "{place}: {full} may not depend on {}; it may on {may:?}", dependency.name);
            if name == "gpupool" && !dependency.dev && OPTIONAL_IN_GPUPOOL.contains(&to) {
                assert!(dependency.optional, "{place}: {} belongs behind a feature", dependency.name);
            }
        }
    }
    assert!(seen >= 9, "only {seen} manifests were found");
}

#[test]
fn the_manifest_reader_sees_every_way_to_write_a_dependency() {
    let manifest = "[package]\nname = \"gpupool-x\"\n[dependencies]\ngpupool-device.workspace = true # why\n\
        serde = \"1\"\nother = { path = \"..\", package = \"gpupool-replay\", optional = true }\n[dev-dependencies]\n\
        gpupool-sim-device = { workspace = true }\n[target.'cfg(unix)'.dependencies]\ngpupool-cli = { path = \"x\" }\n\
        [dependencies.gpupool-capi]\npath = \"x\"\noptional = true\n[features]\ngpupool-x = []\n";
    let all = dependencies(manifest);
    let found: Vec<(&str, bool)> = all.iter().map(|d| (short(&d.name), d.optional)).collect();
    let expected = [("device", false), ("replay", true), ("sim-device", false), ("cli", false), ("capi", true)];
    assert_eq!(found, expected);
    assert_eq!(everything_known("graph-capture").into_iter().collect::<Vec<_>>(), ["allocator", "device"]);
}

/// Folders with a workspace of their own, which this project's rules do not reach.
fn elsewhere(path: &Path) -> bool {
    path.ancestors()
        .skip(1)
        .take_while(|p| !p.ends_with(".."))
        .any(|folder| std::fs::read_to_string(folder.join("Cargo.toml")).is_ok_and(|m| m.contains("[workspace]")))
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

#[test]
fn unsafe_code_stands_in_three_crates_only() {
    let sources = files(&root(), ".rs");
    assert!(sources.len() > 50, "only {} sources were found", sources.len());
    for path in sources.iter().filter(|p| !elsewhere(p)) {
        let place = relative(path);
        if UNSAFE.iter().any(|u| place.starts_with(u)) {
            continue;
        }
        let code = code_only(&std::fs::read_to_string(path).unwrap());
        let lines = lines_with_word(&code, "unsafe");
        assert!(lines.is_empty(), "{place}: `unsafe` in lines {lines:?}");
    }
}

#[test]
fn the_other_libraries_forbid_it_too() {
    let crates = root().join("crates");
    for path in files(&crates, ".rs") {
        let is_root = path.ends_with("src/lib.rs");
        let place = relative(&path);
        if is_root && !UNSAFE.iter().any(|u| place.starts_with(u)) {
            let source = std::fs::read_to_string(&path).unwrap();
            assert!(source.contains("#![forbid(unsafe_code)]"), "{place} does not forbid unsafe code");
        }
    }
}

fn sources_of_crates() -> Vec<std::path::PathBuf> {
    let all = files(&root().join("crates"), ".rs");
    all.into_iter().filter(|p| p.components().any(|c| c.as_os_str() == "src")).collect()
}

#[test]
fn modules_stay_short() {
    for path in sources_of_crates() {
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= LINES, "{} has {lines} lines", relative(&path));
    }
}

/// Whether a file is a module that only tests have: `#[cfg(test)] mod tests;` in the module above.
fn only_for_tests(path: &Path) -> bool {
    path.components().any(|c| c.as_os_str() == "tests") || path.file_stem().is_some_and(|s| s == "tests")
}

#[test]
fn sources_neither_unwrap_nor_panic() {
    for path in sources_of_crates().into_iter().filter(|p| !only_for_tests(p)) {
        let code = without_tests(&code_only(&std::fs::read_to_string(&path).unwrap()));
        for (i, line) in code.lines().enumerate() {
            for word in [".unwrap()", "panic!(", "todo!(", "unimplemented!("] {
                assert!(!line.contains(word), "{}:{}: {word}", relative(&path), i + 1);
            }
        }
    }
}

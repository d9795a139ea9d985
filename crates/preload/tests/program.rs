//! A C program that knows nothing of gpupool, with the library in front of a made-up driver: preloaded, and found first by search path.
#![allow(clippy::unwrap_used, clippy::panic)]
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

fn compiler() -> Option<String> {
    let named = std::env::var("CC").ok();
    named
        .into_iter()
        .chain(["cc", "gcc", "clang"].map(String::from))
        .find(|compiler| Command::new(compiler).arg("--version").output().is_ok_and(|o| o.status.success()))
}

/// The library as cargo built it.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let places = [deps.join("libgpupool_preload.so"), deps.parent().unwrap().join("libgpupool_preload.so")];
    places.iter().find(|place| place.exists()).unwrap_or_else(|| panic!("none of {places:?}")).clone()
}

struct Built {
    folder: PathBuf,
    program: PathBuf,
    library: PathBuf,
}

/// The made-up driver under the driver's name, and the program, in a folder of the test's own. `None`, with the reason printed, where
/// there is no compiler.
fn build(test: &str) -> Option<Built> {
    let Some(compiler) = compiler() else {
        println!("skipped: no C compiler (tried $CC, cc, gcc, clang)");
        return None;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _fresh = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let run = |arguments: &[&str]| {
        let built = Command::new(&compiler).current_dir(&folder).args(arguments).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    };
    let source = |name: &str| format!("{HERE}/tests/c/{name}");
    let driver = source("fake_driver.c");
    run(&[
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        &driver,
        "-Wl,-soname,libcuda.so.1",
        "-o",
        "libcuda.so.1",
    ]);
    run(&[
        "-Wall",
        "-Wextra",
        "-Werror",
        "-D_GNU_SOURCE",
        "-pthread",
        &source("program.c"),
        "-o",
        "program",
        "./libcuda.so.1",
    ]);
    let program = folder.join("program");
    Some(Built { program, folder, library: library() })
}

impl Built {
    fn run(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        let mut command = Command::new(&self.program);
        command.env("LD_LIBRARY_PATH", &self.folder).args(arguments);
        for variable in [
            "GPUPOOL_CONF",
            "GPUPOOL_LIBRARIES",
            "GPUPOOL_LOG",
            "GPUPOOL_SNAPSHOT",
            "GPUPOOL_SNAPSHOT_SIGNAL",
            "LD_PRELOAD",
        ] {
            command.env_remove(variable);
        }
        command.envs(variables.iter().copied()).output().unwrap()
    }

    fn preloaded(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        let library = self.library.to_str().unwrap().to_owned();
        let mut all = vec![("LD_PRELOAD", library.as_str())];
        all.extend_from_slice(variables);
        self.run(&all, arguments)
    }
}

fn said(output: &Output) -> Vec<String> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn allocations_are_served_and_everything_else_reaches_the_driver() {
    let Some(built) = build("served") else { return };
    let without = said(&built.run(&[], &[]));
    assert!(without[0].starts_with("async 2000/2000 sync 1000/1000 "), "{without:?}");
    let with = said(&built.preloaded(&[("GPUPOOL_LOG", "on")], &[]));
    // Three thousand requests took the driver a few segments; none was given back in between. What is cached counts as free.
    let numbers: Vec<&str> = with[0].split([' ', '/']).collect();
    assert_eq!((numbers[1], numbers[2]), ("0", "0"), "{with:?}");
    let segments: u32 = numbers[4].parse().unwrap();
    assert!((1..=4).contains(&segments), "{with:?}");
    assert!(with[0].contains("free_kept 1"), "{with:?}");
    let pool: u64 = numbers.last().unwrap().parse().unwrap();
    assert!(pool > 1000 + (2 << 20), "what we hold counts as the pool's: {with:?}");
    assert_eq!(with[1], "addresses stable 1, captured memory reused 0");
    assert_eq!(with[2], "graph 100 2 2 0", "no allocation reached the capture");
    assert_eq!(with[3], "foreign 1 1 forwarded 1");
    assert_eq!(with[4], "streams 1");
    assert_eq!(with[6], "looked up 0", "a function that is looked up through the driver is ours, too");
    assert_eq!(with[7], "threads 0", "whoever frees what from where");
    assert_eq!(with[8], "unknown context 1", "the driver serves it");
    let own: Vec<i32> = with[5].split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
    assert!((2..=4).contains(&own[0]) && own[1..] == [0, 0], "all is given back when a context ends: {with:?}");
}

#[test]
fn what_the_environment_says_counts() {
    let Some(built) = build("environment") else { return };
    let logged = built.preloaded(&[("GPUPOOL_LOG", "on"), ("GPUPOOL_GRAPH_POOL", "shared")], &[]);
    said(&logged);
    let text = String::from_utf8_lossy(&logged.stderr).into_owned();
    assert!(
        text.contains("serving device 0 (made-up GPU)")
            && text.contains("27053 requests served")
            && text.contains("a context of the program's"),
        "{text}"
    );
    assert!(text.contains("0 graphs and 0 executables hold pools, 0 leave"), "{text}");
    // Wrong settings are said, and the driver serves the program.
    let wrong = built.preloaded(&[("GPUPOOL_CONF", "memory_limt=1GiB")], &[]);
    assert!(said(&wrong)[0].starts_with("async 2000/2000 sync 1000/1000 "));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("GPUPOOL_CONF: `memory_limt=1GiB`"));
    // What libraries look up may be left to the driver.
    let driver = said(&built.preloaded(&[("GPUPOOL_LIBRARIES", "driver")], &[]));
    assert_eq!(driver[6], "looked up 1");
    // A limit is an out-of-memory error of the driver's kind.
    let limited = built.preloaded(&[("GPUPOOL_CONF", "memory_limit=1MiB")], &[]);
    assert_eq!(limited.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&limited.stderr).contains("cuMemAllocAsync"));
}

#[test]
fn a_snapshot_is_written_on_a_signal_and_at_the_end() {
    let Some(built) = build("snapshot") else { return };
    for name in ["state-{device}.json", "state-{device}.pickle"] {
        let path = built.folder.join(name).to_str().unwrap().to_owned();
        let written = path.replace("{device}", "0");
        let lines =
            said(&built.preloaded(&[("GPUPOOL_SNAPSHOT", &path), ("GPUPOOL_SNAPSHOT_SIGNAL", "10")], &[&written]));
        assert_eq!(lines.last().unwrap(), "signalled");
        let file = std::fs::File::open(&written).unwrap();
        let snapshot = gpupool::snapshot::Snapshot::read(&written, file).unwrap();
        assert!(!snapshot.segments.is_empty());
    }
}

/// Programs that open the driver at run time look for `libcuda.so` first.
#[test]
fn found_first_by_search_path_it_serves_what_is_looked_up_through_it() {
    let Some(built) = build("path") else { return };
    std::fs::copy(&built.library, built.folder.join("libcuda.so")).unwrap();
    let source = r#"
        #include <dlfcn.h>
        #include <stdint.h>
        #include <stdio.h>
        int main(void) {
            void *d = dlopen("libcuda.so", RTLD_NOW | RTLD_LOCAL), *context;
            uint64_t a;
            if (!d) { puts(dlerror()); return 1; }
            int (*retain)(void **, int) = (int (*)(void **, int))dlsym(d, "cuDevicePrimaryCtxRetain");
            int (*set)(void *) = (int (*)(void *))dlsym(d, "cuCtxSetCurrent");
            int (*alloc)(uint64_t *, size_t, void *) = (int (*)(uint64_t *, size_t, void *))dlsym(d, "cuMemAllocAsync");
            long (*calls)(const char *) = (long (*)(const char *))dlsym(d, "fake_calls");
            if (retain(&context, 0) || set(context) || alloc(&a, 100, 0)) return 2;
            printf("%ld %ld\n", calls("cuMemAllocAsync"), calls("cuMemAlloc_v2"));
            return 0;
        }"#;
    std::fs::write(built.folder.join("open.c"), source).unwrap();
    let compiled = Command::new(compiler().unwrap())
        .current_dir(&built.folder)
        .args(["open.c", "-o", "open", "-ldl"])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let program = built.folder.join("open");
    let opened = Built { program, folder: built.folder.clone(), library: built.library.clone() };
    assert_eq!(said(&opened.run(&[], &[])), ["0 1"]);
}

#[test]
fn on_a_gpu_contexts_of_a_programs_own_are_served_and_end() {
    // SAFETY: the driver's own name, whose initialisers may run in any process.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_err() {
        println!("skipped: no CUDA driver");
        return;
    }
    let Some(built) = build("contexts") else { return };
    let source = format!("{HERE}/tests/c/contexts.c");
    let compiled = Command::new(compiler().unwrap())
        .current_dir(&built.folder)
        .args([&source, "-o", "contexts", "./libcuda.so.1"])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    // Linked against the made-up driver, run with the real one.
    std::fs::remove_file(built.folder.join("libcuda.so.1")).unwrap();
    let program = Built { program: built.folder.join("contexts"), ..built };
    let with = program.preloaded(&[("GPUPOOL_LOG", "on")], &[]);
    let lines = said(&with);
    assert_eq!(lines.iter().filter(|line| line.contains("0 wrong, 1000 launches")).count(), 3, "{lines:?}");
    assert!(String::from_utf8_lossy(&with.stderr).contains("a context of the program's"));
}

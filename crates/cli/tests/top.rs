//! `gpupool top` against `gpupool stress`, through the socket that it opened.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gpupool"))
}

#[test]
fn a_running_process_is_watched_through_its_socket() {
    let folder = std::env::temp_dir().join(format!("gpupool-top-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("stress.sock");
    let path = socket.display().to_string();
    let refused = program().args(["top", &path, "--once"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "nobody is there yet");
    let mut stress = program()
        .args(["stress", "--threads", "2", "--seconds", "600", "--socket", &path])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(stress.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("gpupool top"), "{said}");
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600, "its owner only");
    let mut allocations = 0;
    for _ in 0..3 {
        let out = program().args(["top", &path, "--once"]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success() && text.contains("reserved") && text.contains("segments taken"), "{text}");
        let line = text.lines().find(|line| line.trim_start().starts_with("allocations")).unwrap();
        let count: u64 = line.split_whitespace().nth(1).unwrap().replace(',', "").parse().unwrap();
        assert!(count >= allocations, "it only grows: {text}");
        allocations = count;
    }
    // The second one finds the socket taken.
    let second = program().args(["stress", "--operations", "10", "--socket", &path]).output().unwrap();
    let words = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{words}");
    assert!(words.contains("another process serves this socket") && second.stdout.is_empty(), "{words}");
    stress.kill().unwrap();
    stress.wait().unwrap();
    let left = program().args(["top", &path]).output().unwrap();
    let words = String::from_utf8_lossy(&left.stderr);
    assert!(left.status.code() == Some(2) && words.contains("the process that opened it is gone"), "{words}");
    // What a dead process left is replaced, and removed at the end.
    let third = program().args(["stress", "--operations", "10", "--socket", &path]).output().unwrap();
    assert!(third.status.success(), "{}", String::from_utf8_lossy(&third.stderr));
    assert!(!socket.exists());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_path_that_is_no_socket_is_told_at_once() {
    let folder = std::env::temp_dir().join(format!("gpupool-no-socket-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("file").display().to_string();
    std::fs::write(&file, "kept").unwrap();
    let refused = |arguments: &[&str], words: &str| {
        let output = program().args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words) && output.stdout.is_empty(), "{arguments:?}: {said}");
    };
    refused(&["top", &file], "this is no socket");
    refused(&["top", &folder.display().to_string()], "this is no socket");
    refused(&["top", &folder.join("none").display().to_string()], "there is no such socket");
    // A run of ten minutes would say so at its end.
    let stress = ["stress", "--seconds", "600", "--socket"];
    refused(&[&stress[..], &[file.as_str()]].concat(), "a file that is no socket is there");
    let nowhere = folder.join("no/such/folder").display().to_string();
    refused(&[&stress[..], &[nowhere.as_str()]].concat(), "there is no such folder");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
    std::fs::remove_dir_all(&folder).unwrap();
}

//! docs/faults.md tells the truth: every entry has a row, and every test it names exists and runs.

use std::collections::BTreeMap;

use gpupool_tests::rust_text::root;

fn rows() -> BTreeMap<u32, String> {
    let text = std::fs::read_to_string(root().join("docs/faults.md")).unwrap();
    let mut rows = BTreeMap::new();
    for line in text.lines() {
        let Some(number) = line.strip_prefix("| ").and_then(|l| l.split(' ').next()?.parse().ok()) else { continue };
        assert!(rows.insert(number, line.to_owned()).is_none(), "entry {number} has two rows");
    }
    rows
}

#[test]
fn every_entry_has_one_row_that_says_what_holds_it() {
    let rows = rows();
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), (1..=100).collect::<Vec<_>>());
    for (number, row) in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        assert!(cells.len() == 3 && cells.iter().all(|c| !c.is_empty()), "entry {number}: {row}");
    }
}

#[test]
fn every_test_that_is_named_exists_and_is_ignored_only_if_it_says_so() {
    let mut named = 0;
    for (number, row) in rows() {
        for name in row.split(['`', ' ', '*', ',']).filter(|w| w.contains("::")) {
            let (file, test) = name.split_once("::").unwrap();
            // `file::test` is one of tests/tests, `crate/file::test` one of a crate's own.
            let places = match file.split_once('/') {
                None => vec![root().join(format!("tests/tests/{file}.rs"))],
                Some((of, file)) => {
                    ["tests", "src"].map(|at| root().join(format!("crates/{of}/{at}/{file}.rs"))).into()
                }
            };
            let source = places.iter().find_map(|path| std::fs::read_to_string(path).ok());
            let source = source.unwrap_or_else(|| panic!("entry {number}: none of {places:?} is there"));
            let lines: Vec<&str> = source.lines().collect();
            let at = lines.iter().position(|l| l.trim() == format!("fn {test}() {{"));
            let at = at.unwrap_or_else(|| panic!("entry {number}: there is no {name}"));
            let ignored = lines[at - 1].trim().starts_with("#[ignore");
            assert!(ignored || lines[at - 1].trim() == "#[test]", "entry {number}: {name} is no test");
            assert_eq!(ignored, row.contains(&format!("ignored: `{name}`")), "entry {number}: {name}");
            named += 1;
        }
    }
    assert!(named > 60, "only {named} tests are named");
}

//! Rust sources as text, for rules that the compiler cannot hold: with comments and literals blanked out, and without what is only
//! compiled for tests. Line numbers stay.

use std::path::{Path, PathBuf};

/// The repository's folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files under `folder` whose name ends so, sorted. Build output and hidden folders are left out.
pub fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return out };
    for path in entries.flatten().map(|e| e.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                out.extend(files(&path, ending));
            }
        } else if name.ends_with(ending) {
            out.push(path);
        }
    }
    out.sort();
    out
}

/// `source` with every comment and the inside of every string and character literal turned into blanks.
pub fn code_only(source: &str) -> String {
    let text: Vec<char> = source.chars().collect();
    let at = |i: usize| text.get(i).copied().unwrap_or('\0');
    let blank = |c: char| if c == '\n' { '\n' } else { ' ' };
    let mut out = String::with_capacity(source.len());
    let mut i = 0;
    while i < text.len() {
        let end = match at(i) {
            '/' if at(i + 1) == '/' => (i..text.len()).find(|j| at(*j) == '\n').unwrap_or(text.len()),
            '/' if at(i + 1) == '*' => end_of_comment(&text, i),
            '"' => end_of_string(&text, i),
            'r' if !is_word(at(i.wrapping_sub(1))) && raw_hashes(&text, i + 1).is_some() => {
                end_of_raw_string(&text, i + 1)
            }
            '\'' => end_of_char(&text, i),
            _ => i,
        };
        if end > i {
            out.extend((i..end).map(|j| blank(at(j))));
            i = end;
        } else {
            out.push(at(i));
            i += 1;
        }
    }
    out
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn end_of_comment(text: &[char], start: usize) -> usize {
    let (mut i, mut depth) = (start, 0);
    while i < text.len() {
        match (text[i], text.get(i + 1)) {
            ('/', Some('*')) => (i, depth) = (i + 2, depth + 1),
            ('*', Some('/')) => (i, depth) = (i + 2, depth - 1),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    i
}

fn end_of_string(text: &[char], start: usize) -> usize {
    let mut i = start + 1;
    while i < text.len() && text[i] != '"' {
        i += if text[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(text.len())
}

/// How many `#` stand between here and a `"`, if that is what stands here.
fn raw_hashes(text: &[char], start: usize) -> Option<usize> {
    let hashes = text[start.min(text.len())..].iter().take_while(|c| **c == '#').count();
    (text.get(start + hashes) == Some(&'"')).then_some(hashes)
}

fn end_of_raw_string(text: &[char], start: usize) -> usize {
    let hashes = raw_hashes(text, start).unwrap_or(0);
    let mut i = start + hashes + 1;
    while i < text.len() {
        if text[i] == '"' && text[i + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    i
}

/// The end of a character literal; the start itself for a lifetime.
fn end_of_char(text: &[char], start: usize) -> usize {
    match (text.get(start + 1), text.get(start + 2)) {
        (Some('\\'), _) => (start + 3..text.len()).find(|j| text[*j] == '\'').map_or(text.len(), |j| j + 1),
        (Some(_), Some('\'')) => start + 3,
        _ => start,
    }
}

/// `code` without the items under `#[cfg(test)]`, which become blanks. `code` is what [`code_only`] returned.
pub fn without_tests(code: &str) -> String {
    let mut text: Vec<char> = code.chars().collect();
    let mark: Vec<char> = "#[cfg(test)]".chars().collect();
    let mut i = 0;
    while i + mark.len() <= text.len() {
        if text[i..i + mark.len()] != mark[..] {
            i += 1;
            continue;
        }
        // The item ends at a semicolon, or at the brace that closes its first one.
        let (mut end, mut depth) = (i + mark.len(), 0);
        while end < text.len() {
            match text[end] {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            end += 1;
            if depth == 0 && matches!(text[end - 1], ';' | '}') {
                break;
            }
        }
        for c in &mut text[i..end] {
            if *c != '\n' {
                *c = ' ';
            }
        }
        i = end;
    }
    text.into_iter().collect()
}

/// The lines, from 1, where `word` stands as a whole word.
pub fn lines_with_word(code: &str, word: &str) -> Vec<usize> {
    let has = |line: &str| {
        line.match_indices(word).any(|(at, _)| {
            let before = line[..at].chars().next_back().is_some_and(is_word);
            let after = line[at + word.len()..].chars().next().is_some_and(is_word);
            !before && !after
        })
    };
    code.lines().enumerate().filter(|(_, line)| has(line)).map(|(i, _)| i + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_and_lines_stay() {
        let source =
            "a /* x /* y */ z */ b // unsafe\n\"unsafe \\\" \" r#\"unsafe\"# 'u' '\\'' fn f<'a>(x: &'a str) unsafe";
        let code = code_only(source);
        assert_eq!(code.matches("unsafe").count(), 1);
        assert_eq!(code.lines().count(), 2);
        assert!(code.contains("fn f<'a>(x: &'a str)"));
        assert_eq!(code.chars().count(), source.chars().count());
    }

    #[test]
    fn items_for_tests_go() {
        let code =
            "fn a() { panic!() }\n#[cfg(test)]\nmod tests { fn b() { unwrap() } }\n#[cfg(test)]\nmod more;\nfn c() {}";
        let code = without_tests(code);
        assert!(code.contains("panic") && code.contains("fn c()"));
        assert!(!code.contains("unwrap") && !code.contains("more"));
        assert_eq!(lines_with_word(&code, "c"), [6]);
    }
}

//! The page in a real browser: it shows a history of 300,000 events, and the work of a picture depends on the pixels, not on the events.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic in a test is its report")]

mod browser;

use browser::{browser, page_of, recorded, repeated, shown, temporary};
use serde_json::Value;

/// Leaves a history of 300,000 events for whoever wants to measure: `GPUPOOL_KEEP=FILE cargo test -p gpupool-cli --test page -- --ignored`,
/// `GPUPOOL_EVENTS` of them if that is set.
#[test]
#[ignore = "makes a file to measure with"]
fn make_a_long_history() {
    let events = std::env::var("GPUPOOL_EVENTS").ok().and_then(|n| n.parse().ok()).unwrap_or(300_000);
    std::fs::copy(repeated(events), std::env::var_os("GPUPOOL_KEEP").unwrap()).unwrap();
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let text = std::fs::read_to_string(page_of(&recorded("train.pickle"), "plain.html")).unwrap();
    for word in ["http://", "https://", "<link", "src=", "@import", "url(", "fetch(", "XMLHttpRequest", "%%"] {
        assert!(!text.contains(word), "{word}");
    }
    assert!(text.contains("train.py:8 forward") && text.contains("default-src 'none'"));
}

#[test]
fn what_a_snapshot_says_cannot_become_code() {
    let evil = temporary("evil.json");
    let name = "</script><script>document.title='gotcha'</script><img src=x onerror=alert(1)>";
    let text = serde_json::json!({
        "segments": [{"device": 0, "address": 4096, "total_size": 512, "stream": 0, "blocks":
            [{"size": 512, "state": "active_allocated", "frames": [{"name": name, "filename": name, "line": 1}]}]}],
        "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "user_metadata": name}]],
    });
    std::fs::write(&evil, text.to_string()).unwrap();
    let page = std::fs::read_to_string(page_of(&evil, "evil.html")).unwrap();
    assert!(!page.contains("</script><script>document") && !page.contains("<img"));
}

#[test]
fn a_picture_takes_work_by_the_pixel_and_not_by_the_event() {
    let Some(browser) = browser() else { return };
    let small = shown(browser, &page_of(&recorded("train.pickle"), "small.html"), &[], "work");
    assert!(small.0.contains("256.0 MiB reserved in 17 segments"), "the figures are there");
    let (dom, work) = shown(browser, &page_of(&repeated(300_000), "large.html"), &[], "work");
    assert!(dom.contains("train.py:8 forward"), "the legend is there");
    let figure = |key: &str| work[key].as_f64().unwrap();
    let columns = figure("columns");
    assert!((1000.0..=1400.0).contains(&columns), "a column a pixel: {work}");
    assert!(figure("points") / columns <= 14.0, "a point a column for each area: {work}");
    // A checkpoint each 256 events, and the tree of maxima: two nodes a level.
    assert!(figure("visitedPerColumn") <= 256.0 + 2.0 * 20.0, "{work}");
    println!("first picture after {} ms", figure("firstPictureMs"));
    for large in ["large.html", "repeated.pickle"] {
        std::fs::remove_file(temporary(large)).unwrap();
    }
}

/// The page of the training run with a script behind its own, which does something and says in `seen` what it saw. The script has
/// `at` (an element by its name), `key` and `point`.
fn after(browser: &str, name: &str, flags: &[&str], script: &str) -> Value {
    let page = page_of(&recorded("train.pickle"), &format!("{name}.html"));
    let text = std::fs::read_to_string(&page).unwrap();
    let script = format!(
        "<output id=\"seen\" hidden=\"\"></output><script>'use strict'; (() => {{
            const at = (id) => document.getElementById(id);
            const key = (id, key) => {{
                at(id).focus();
                return at(id).dispatchEvent(new KeyboardEvent('keydown', {{ key, bubbles: true, cancelable: true }}));
            }};
            const point = (id, x, y) => at(id).dispatchEvent(new PointerEvent('pointermove', {{ bubbles: true,
                clientX: at(id).getBoundingClientRect().left + x, clientY: at(id).getBoundingClientRect().top + y }}));
            const drawn = () => new Promise((done) => setTimeout(done, 20));
            const view = () => JSON.parse(at('work').textContent).view;
            (async () => {{ {script} }})().catch((error) => {{ at('seen').textContent = JSON.stringify({{ error: String(error) }}); }});
        }})();</script></body>"
    );
    // Without a window frames hardly come: here they are moments.
    let moments =
        "<body><script>window.requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), 0);</script>";
    let text = text.replace("<body>", moments).replace("</body>", &script);
    std::fs::write(&page, text).unwrap();
    let flags: Vec<&str> = ["--virtual-time-budget=5000"].iter().chain(flags).copied().collect();
    let (_, told) = shown(browser, &page, &flags, "seen");
    assert!(told["error"].is_null(), "{told}");
    told
}

#[test]
fn the_page_is_light_or_dark_as_the_reader_wants_it() {
    let Some(browser) = browser() else { return };
    let script = "const style = getComputedStyle(document.body);
        const luminance = (colour) => colour.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765;
        at('seen').textContent = JSON.stringify({ back: luminance(style.backgroundColor), text: luminance(style.color) });";
    let seen = |scheme: &str| {
        let told = after(
            browser,
            &format!("scheme-{scheme}"),
            &[&format!("--blink-settings=preferredColorScheme={scheme}")],
            script,
        );
        (told["back"].as_f64().unwrap(), told["text"].as_f64().unwrap())
    };
    let (dark, light) = (seen("0"), seen("1"));
    assert!(dark.0 < 0.2 && dark.1 > 0.8, "dark: background and text {dark:?}");
    assert!(light.0 > 0.8 && light.1 < 0.2, "light: background and text {light:?}");
}

#[test]
fn the_page_is_used_by_keyboard() {
    let Some(browser) = browser() else { return };
    let script = "const all = view();
        const taken = !key('timeline', '+'); await drawn();
        const closer = view();
        key('timeline', 'ArrowRight'); await drawn();
        const right = view(), said = at('hover').textContent;
        key('timeline', '-'); await drawn();
        const wider = view();
        key('timeline', 'Home'); await drawn();
        const home = view();
        const focusable = ['device', 'group', 'search', 'out', 'in', 'all', 'timeline', 'colour', 'scroll'].filter((id) => {
            at(id).focus();
            return document.activeElement === at(id);
        });
        const outline = (() => { at('timeline').focus(); return getComputedStyle(at('timeline')).outlineStyle; })();
        at('seen').textContent = JSON.stringify({ all, taken, closer, right, wider, home, said, focusable, outline });";
    let told = after(browser, "keyboard", &[], script);
    let span = |key: &str| told[key][1].as_f64().unwrap() - told[key][0].as_f64().unwrap();
    assert_eq!(told["taken"], true, "the page does not scroll as well: {told}");
    assert!(span("closer") < span("all") && span("wider") > span("closer"), "{told}");
    assert!(told["said"].as_str().unwrap().contains("event"), "an arrow tells of an event: {told}");
    assert_eq!(told["home"], told["all"]);
    assert_eq!(told["focusable"].as_array().unwrap().len(), 9, "{told}");
}

#[test]
fn the_pointer_names_the_block_and_its_place_in_the_program() {
    let Some(browser) = browser() else { return };
    let script = "const box = at('timeline').getBoundingClientRect();
        let best = '';
        for (let y = box.height - 30; y > 20 && !best.includes('train.py'); y -= 20) {
            point('timeline', box.width * 0.7, y); await drawn();
            best = at('hover').textContent;
        }
        point('segments', 300, 9);
        const block = at('block').textContent;
        at('search').value = 'train.py:8'; at('search').dispatchEvent(new Event('input', { bubbles: true })); await drawn();
        const legend = at('legend').textContent, found = at('timeline').toDataURL();
        at('search').value = 'nothing has this name'; at('search').dispatchEvent(new Event('input', { bubbles: true })); await drawn();
        at('seen').textContent = JSON.stringify({ best, block, legend, same: found === at('timeline').toDataURL() });";
    let told = after(browser, "pointer", &[], script);
    let best = told["best"].as_str().unwrap();
    assert!(best.contains(" at 0x") && best.contains("train.py") && best.contains("live"), "{told}");
    let block = told["block"].as_str().unwrap();
    assert!(block.contains("segment of") && block.contains("0x"), "{told}");
    assert!(told["legend"].as_str().unwrap().contains("matches"), "{told}");
    assert_eq!(told["same"], false, "a search changes what is picked out: {told}");
}

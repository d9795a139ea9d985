"use strict";
// The page's own code. A picture of the timeline takes, for each pixel column, the moment of its events at which most was live (a tree of
// maxima finds it), and what each area had then (a checkpoint each STEP events, and the events after it). So the work of a picture is
// columns * (STEP + log events), however long the history is.
(() => {
  const born = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const STEP = 256, MOST = 14;
  const COLOURS = ["#2f6fde", "#e2a400", "#1f9e6e", "#d1495b", "#8a5bd6", "#e07b39", "#2aa7c9", "#a3a92b", "#c259a6", "#6f7f95", "#58b368", "#b3704e", "#5461c8", "#9b9ba1"];
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const bytes = (n) => { let u = 0; while (n >= 1024 && u < 4) { n /= 1024; u++; } return (u ? n.toFixed(n < 100 ? 2 : 1) : n) + " " + units[u]; };
  const hex = (n) => "0x" + n.toString(16);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const work = { firstPictureMs: 0, columns: 0, points: 0, visited: 0, visitedPerColumn: 0, frames: 0 };

  // ---- the history of one device ----
  let history = null;
  function load(device) {
    const d = device, n = d.events, blocks = d.start.length;
    // Events as movements of blocks: block + 1 or -(block + 1); 0 where nothing moves. Blocks from before the history move in at no event.
    const moves = new Int32Array(n), first = [], total = new Float64Array(n || 1);
    let base = 0;
    for (let b = 0; b < blocks; b++) if (d.made[b]) moves[d.start[b]] = b + 1; else { base += d.size[b]; first.push(b); }
    for (let b = 0; b < blocks; b++) if (d.end[b] < n && moves[d.end[b]] === 0) moves[d.end[b]] = -(b + 1);
    let now = base;
    for (let i = 0; i < n; i++) {
      const m = moves[i];
      if (m > 0) now += d.size[m - 1]; else if (m < 0) now -= d.size[-m - 1];
      total[i] = now;
    }
    // A tree of the places of maxima.
    let size = 1; while (size < n) size *= 2;
    const tree = new Int32Array(2 * size).fill(-1);
    for (let i = 0; i < n; i++) tree[size + i] = i;
    for (let i = size - 1; i > 0; i--) {
      const a = tree[2 * i], b = tree[2 * i + 1];
      tree[i] = b < 0 || (a >= 0 && total[a] >= total[b]) ? a : b;
    }
    return { d, n, moves, total, tree, size, first, blocks };
  }
  function largest(h, from, to) {
    let best = from, l = from + h.size, r = to + h.size;
    const look = (i) => { const c = h.tree[i]; if (c >= 0 && h.total[c] > h.total[best]) best = c; work.visited++; };
    while (l < r) { if (l & 1) look(l++); if (r & 1) look(--r); l >>= 1; r >>= 1; }
    return best;
  }

  // ---- areas: which block belongs to which ----
  let areas = null;
  function sizeClass(n) { return Math.floor(Math.log2(Math.max(n, 1))); }
  function matches(h, text) {
    const owners = data.owners.map((name, i) => (name + "\n" + data.stacks[i]).toLowerCase().includes(text));
    const pools = data.pools.map((n) => n.toLowerCase().includes(text)), streams = data.streams.map((n) => n.toLowerCase().includes(text));
    return (b) => owners[h.d.owner[b]] || pools[h.d.pool[b]] || streams[h.d.stream[b]] || hex(h.d.address[b]).includes(text);
  }
  function group() {
    const h = history, by = at("group").value, text = at("search").value.trim().toLowerCase();
    const of = new Int32Array(h.blocks), names = [];
    if (text) {
      const is = matches(h, text);
      for (let b = 0; b < h.blocks; b++) of[b] = is(b) ? 0 : 1;
      names.push("matches", "everything else");
    } else {
      const key = by === "size" ? (b) => sizeClass(h.d.size[b]) : (b) => h.d[by][b];
      const name = by === "size" ? (k) => bytes(2 ** k) + " to " + bytes(2 ** (k + 1)) : (k) => data[by === "owner" ? "owners" : by === "pool" ? "pools" : "streams"][k];
      const sums = new Map();
      // Areas are ranked by what they hold over time; equal names are one.
      for (let b = 0; b < h.blocks; b++) {
        const k = name(key(b));
        sums.set(k, (sums.get(k) || 0) + h.d.size[b] * Math.max(1, h.d.end[b] - h.d.start[b]));
      }
      const ranked = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
      const place = new Map(ranked.map((k, i) => [k, Math.min(i, MOST - 1)]));
      ranked.slice(0, MOST - 1).forEach((k) => names.push(k));
      if (ranked.length === MOST) names.push(ranked[MOST - 1]);
      if (ranked.length > MOST) names.push((ranked.length - MOST + 1) + " others");
      for (let b = 0; b < h.blocks; b++) of[b] = place.get(name(key(b)));
    }
    // What each area has before each STEP-th event.
    const k = names.length, checks = new Float64Array((Math.floor(h.n / STEP) + 1) * k), now = new Float64Array(k);
    for (const b of h.first) now[of[b]] += h.d.size[b];
    for (let i = 0; i < h.n; i++) {
      if (i % STEP === 0) checks.set(now, (i / STEP) * k);
      const m = h.moves[i];
      if (m > 0) now[of[m - 1]] += h.d.size[m - 1]; else if (m < 0) now[of[-m - 1]] -= h.d.size[-m - 1];
    }
    areas = { of, names, checks, k };
    const legend = at("legend");
    legend.replaceChildren(...names.map((n, i) => {
      const item = document.createElement("li"), mark = document.createElement("i");
      mark.style.background = colour(i, names.length);
      item.append(mark, n);
      return item;
    }));
  }
  const colour = (i) => at("search").value.trim() && i === 1 ? css("--free") : COLOURS[i % COLOURS.length];
  function values(index, out) {
    const h = history, a = areas, start = Math.floor(index / STEP);
    for (let c = 0; c < a.k; c++) out[c] = a.checks[start * a.k + c];
    for (let i = start * STEP; i <= index; i++) {
      const m = h.moves[i];
      if (m > 0) out[a.of[m - 1]] += h.d.size[m - 1]; else if (m < 0) out[a.of[-m - 1]] -= h.d.size[-m - 1];
      work.visited++;
    }
  }

  // ---- the timeline ----
  const view = { from: 0, to: 1 };
  const canvas = at("timeline");
  const LEFT = 74, BOTTOM = 22;
  let columns = [];
  function fit(c, height) {
    const scale = window.devicePixelRatio || 1, width = c.clientWidth;
    if (c.width !== Math.round(width * scale) || c.height !== Math.round(height * scale)) { c.width = Math.round(width * scale); c.height = Math.round(height * scale); }
    const g = c.getContext("2d");
    g.setTransform(scale, 0, 0, scale, 0, 0);
    return g;
  }
  function draw() {
    const g = fit(canvas, 340), width = canvas.clientWidth - LEFT, height = 340 - BOTTOM, h = history;
    g.clearRect(0, 0, canvas.clientWidth, 340);
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = css("--dim");
    work.visited = 0; work.points = 0;
    if (!h || !h.n) { g.fillText("This snapshot has no history.", LEFT, 40); work.columns = 0; return; }
    const span = view.to - view.from, count = Math.max(1, Math.min(Math.floor(width), Math.ceil(span)));
    columns = [];
    const out = new Float64Array(areas.k), levels = new Float64Array(count * areas.k);
    let top = 1;
    for (let x = 0; x < count; x++) {
      const from = Math.min(h.n - 1, Math.floor(view.from + span * x / count)), to = Math.min(h.n, Math.max(from + 1, Math.floor(view.from + span * (x + 1) / count)));
      const index = largest(h, from, to);
      values(index, out);
      let sum = 0;
      for (let c = 0; c < areas.k; c++) { sum += out[c]; levels[x * areas.k + c] = sum; }
      columns.push(index);
      top = Math.max(top, sum);
    }
    const step = width / count, y = (v) => height - (height - 14) * v / top;
    for (let c = areas.k - 1; c >= 0; c--) {
      g.beginPath();
      g.moveTo(LEFT, height);
      for (let x = 0; x < count; x++) {
        const v = y(levels[x * areas.k + c]);
        g.lineTo(LEFT + x * step, v); g.lineTo(LEFT + (x + 1) * step, v);
        work.points++;
      }
      g.lineTo(LEFT + width, height);
      g.fillStyle = colour(c);
      g.fill();
    }
    g.fillStyle = css("--dim"); g.strokeStyle = css("--line");
    g.textAlign = "right";
    for (let i = 0; i <= 4; i++) { const v = top * i / 4; g.fillText(bytes(v), LEFT - 6, y(v) + 4); g.beginPath(); g.moveTo(LEFT, y(v)); g.lineTo(LEFT + width, y(v)); g.globalAlpha = 0.5; g.stroke(); g.globalAlpha = 1; }
    g.textAlign = "left";
    const ticks = Math.max(2, Math.floor(width / 190));
    for (let i = 0; i <= ticks; i++) {
      const e = Math.min(h.n - 1, Math.floor(view.from + span * i / ticks)), text = "event " + (e + 1) + (h.d.times[e] ? ", " + (h.d.times[e] / 1e6).toFixed(3) + " s" : "");
      g.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
      g.fillText(text, LEFT + width * i / ticks, 340 - 7);
    }
    g.fillStyle = "#d1495b"; g.textAlign = "center";
    for (const e of h.d.oom) if (e >= view.from && e < view.to) { const x = LEFT + width * (e - view.from + 0.5) / span; g.fillRect(x - 1, 10, 2, height - 10); g.fillText("out of memory", Math.min(Math.max(x, LEFT + 40), LEFT + width - 40), 9); }
    if (cursor !== null) { const x = LEFT + width * (cursor - view.from + 0.5) / span; g.fillStyle = css("--text"); g.fillRect(x, 10, 1, height - 10); }
    work.columns = count; work.visitedPerColumn = work.visited / count; work.top = top; work.height = height; work.view = [view.from, view.to]; work.frames++;
    if (!work.firstPictureMs) work.firstPictureMs = performance.now() - born;
    at("work").textContent = JSON.stringify(work);
  }
  let queued = false;
  function redraw() { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(); }); } }
  function clamp() {
    const n = Math.max(1, history.n), span = Math.min(n, Math.max(8, view.to - view.from));
    view.from = Math.max(0, Math.min(view.from, n - span)); view.to = view.from + span;
  }
  function zoom(factor, centre) { const c = centre ?? (view.from + view.to) / 2; view.from = c - (c - view.from) * factor; view.to = c + (view.to - c) * factor; clamp(); redraw(); }
  function pan(share) { const by = (view.to - view.from) * share; view.from += by; view.to += by; clamp(); redraw(); }
  const eventAt = (x) => view.from + (view.to - view.from) * Math.max(0, Math.min(1, (x - LEFT) / (canvas.clientWidth - LEFT)));
  let cursor = null, dragging = null;
  canvas.addEventListener("wheel", (e) => { e.preventDefault(); zoom(Math.exp(e.deltaY * 0.0015), eventAt(e.offsetX)); }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => { dragging = e.offsetX; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointerup", () => { dragging = null; });
  canvas.addEventListener("pointermove", (e) => {
    if (dragging !== null) { pan((dragging - e.offsetX) / (canvas.clientWidth - LEFT)); dragging = e.offsetX; return; }
    tell(Math.floor(eventAt(e.offsetX)), e.offsetY);
  });
  canvas.addEventListener("keydown", (e) => {
    const steps = { ArrowLeft: () => moveCursor(-1), ArrowRight: () => moveCursor(1), "+": () => zoom(0.6, cursor ?? undefined), "=": () => zoom(0.6, cursor ?? undefined), "-": () => zoom(1 / 0.6, cursor ?? undefined), Home: all, PageUp: () => pan(-0.8), PageDown: () => pan(0.8) };
    if (steps[e.key]) { e.preventDefault(); steps[e.key](); }
  });
  function moveCursor(by) {
    const step = Math.max(1, Math.round((view.to - view.from) / 100));
    cursor = Math.max(0, Math.min(history.n - 1, (cursor ?? Math.floor((view.from + view.to) / 2)) + by * step));
    if (cursor < view.from || cursor >= view.to) pan(by * 0.5);
    tell(cursor, null);
  }
  // Names the block under the pointer: the area by its height, the block by its place among those of the area.
  function tell(index, y) {
    const h = history;
    if (!h || !h.n) return;
    const span = view.to - view.from, column = Math.max(0, Math.min(columns.length - 1, Math.floor((index + 0.5 - view.from) / span * columns.length)));
    if (y !== null && columns.length) index = columns[column];
    cursor = index;
    redraw();
    const out = new Float64Array(areas.k);
    values(index, out);
    const total = h.total[index];
    let text = "event " + (index + 1) + " of " + h.n + ", " + (h.d.times[index] / 1e6).toFixed(6) + " s: " + bytes(total) + " live";
    if (y === null) {
      const order = [...out.keys()].sort((a, b) => out[b] - out[a]).filter((c) => out[c] > 0).slice(0, 5);
      at("hover").textContent = text + "\n" + order.map((c) => bytes(out[c]) + "  " + areas.names[c]).join("\n");
      return;
    }
    let level = (work.height - y) / (work.height - 14) * work.top, c = 0;
    while (c < areas.k && level > out[c]) level -= out[c++];
    if (c === areas.k || level < 0) { at("hover").textContent = text; return; }
    for (let b = 0; b < h.blocks; b++) {
      if (areas.of[b] !== c || h.d.start[b] > index || index >= h.d.end[b]) continue;
      if (level <= h.d.size[b]) {
        const stack = data.stacks[h.d.owner[b]];
        text += "\n" + bytes(h.d.size[b]) + " at " + hex(h.d.address[b]) + ", " + data.pools[h.d.pool[b]] + ", " + data.streams[h.d.stream[b]] + ", "
          + (h.d.made[b] ? "from event " + (h.d.start[b] + 1) : "from before the history") + (h.d.end[b] < h.n ? " to " + (h.d.end[b] + 1) : " to the end")
          + "\n" + data.owners[h.d.owner[b]] + (stack ? "\n" + stack : "");
        break;
      }
      level -= h.d.size[b];
    }
    at("hover").textContent = text;
  }
  function all() { view.from = 0; view.to = Math.max(1, history.n); clamp(); redraw(); }

  // ---- segments ----
  const ROW = 18, bars = at("segments"), scroll = at("scroll");
  let order = [];
  function blockColour(s, b) {
    const by = at("colour").value;
    if (b[1] === 2) return css("--free");
    if (by === "pool") return COLOURS[s.pool % COLOURS.length];
    if (by === "stream") return COLOURS[s.stream % COLOURS.length];
    if (by === "owner") return COLOURS[b[2] % COLOURS.length];
    if (by === "age") return b[4] < 0 ? "#5b3fa0" : "hsl(" + Math.round(260 - 210 * b[4] / Math.max(1, history.n)) + " 60% 52%)";
    return b[1] === 1 ? css("--pending") : css("--live");
  }
  function drawSegments() {
    const g = fit(bars, 300), width = bars.clientWidth, most = order.length ? order.reduce((m, s) => Math.max(m, s.size), 1) : 1;
    g.clearRect(0, 0, width, 300);
    g.font = "11px ui-monospace, monospace";
    const first = Math.floor(scroll.scrollTop / ROW), text = at("search").value.trim().toLowerCase();
    const free = css("--free");
    for (let i = first; i < Math.min(order.length, first + 18); i++) {
      const s = order[i], y = i * ROW - scroll.scrollTop, scale = (width - 300) * Math.max(0.02, s.size / most) / s.size;
      g.fillStyle = css("--text");
      g.fillText(hex(s.address) + " " + bytes(s.size).padStart(10) + " " + data.pools[s.pool], 4, y + 13);
      let at_ = 0, drawn = -1;
      for (const b of s.blocks) {
        const x0 = 290 + at_ * scale, x1 = 290 + (at_ + b[0]) * scale;
        at_ += b[0];
        // Blocks thinner than a pixel are drawn once a pixel.
        if (x1 - x0 < 1 && Math.floor(x1) === drawn) continue;
        drawn = Math.floor(x1);
        let fill = blockColour(s, b);
        if (text && !(data.owners[b[2]] + data.stacks[b[2]]).toLowerCase().includes(text)) fill = free;
        g.fillStyle = fill;
        g.fillRect(x0, y + 2, Math.max(1, x1 - x0 - (x1 - x0 > 3 ? 0.6 : 0)), ROW - 4);
      }
    }
  }
  function blockAt(e) {
    const i = Math.floor((e.offsetY + scroll.scrollTop) / ROW), s = order[i];
    if (!s) return;
    const most = order.reduce((m, o) => Math.max(m, o.size), 1), scale = (bars.clientWidth - 300) * Math.max(0.02, s.size / most) / s.size;
    let place = (e.offsetX - 290) / scale, address = s.address;
    for (const b of s.blocks) {
      if (place >= 0 && place < b[0]) {
        at("block").textContent = bytes(b[0]) + " at " + hex(address) + ": " + ["live", "freed, but some stream may still use it", "free"][b[1]]
          + (b[1] < 2 ? ", " + bytes(b[3]) + " requested, " + (b[4] < 0 ? "older than the history" : "from event " + (b[4] + 1)) + "\n" + data.owners[b[2]] + "\n" + data.stacks[b[2]] : "")
          + "\nsegment of " + bytes(s.size) + ", " + data.pools[s.pool] + ", " + data.streams[s.stream] + ", " + s.part;
        return;
      }
      place -= b[0]; address += b[0];
    }
  }
  bars.addEventListener("pointermove", blockAt);
  scroll.addEventListener("scroll", drawSegments);

  // ---- figures ----
  function table(caption, head, rows) {
    const t = document.createElement("table"), c = document.createElement("caption");
    c.textContent = caption; t.append(c);
    const line = (cells, tag) => { const r = document.createElement("tr"); cells.forEach((v) => { const d = document.createElement(tag); d.textContent = v; r.append(d); }); t.append(r); };
    if (head) line(head, "th");
    rows.forEach((r) => line(r, "td"));
    return t;
  }
  function figures() {
    const s = data.summary, t = s.total, many = (a) => [bytes(a.reserved), bytes(a.live), bytes(a.pending), bytes(a.free), a.segments];
    at("headline").textContent = bytes(t.reserved) + " reserved in " + t.segments + " segments: " + bytes(t.live) + " live in " + t.live_blocks + " blocks, " + bytes(t.pending) + " pending, " + bytes(t.free) + " free, longest run " + bytes(s.largest_free_run) + ".";
    const head = ["", "reserved", "live", "pending", "free", "segments"], out = [];
    out.push(table("By pool", head, s.by_pool.map((p) => [p.pool[0] || p.pool[1] ? "(" + p.pool + ")" : "default", ...many(p)])));
    out.push(table("Default pool by stream", head, s.by_stream.slice(0, 20).map((p) => [hex(p.stream), ...many(p)])));
    out.push(table("By size of segment", head, s.by_segment_size.slice(0, 20).map((p) => [bytes(p.segment_size), ...many(p)])));
    out.push(table("Free bytes by length of the run", ["from", "runs", "bytes"], s.free_runs.map((r) => [bytes(r.from), r.runs, bytes(r.bytes)])));
    out.push(table("Live by owner", ["", "bytes", "blocks"], s.owners.map((o) => [o.owner, bytes(o.bytes), o.blocks])));
    s.peaks.forEach((p) => out.push(table("Most live on device " + p.device + ": " + bytes(p.bytes) + " at event " + (p.event + 1), ["", "bytes", "blocks"], p.owners.map((o) => [o.owner, bytes(o.bytes), o.blocks]))));
    if (s.graphs.length) out.push(table("Graphs", ["", "writes", "its own", "shared", "live results"], s.graphs.map((g) => ["g" + g.id, bytes(g.written), bytes(g.exclusive), bytes(g.shared), bytes(g.live)])));
    const stats = data.gpupool.stats;
    if (stats) out.push(table("Counters", ["", ""], Object.entries(stats).map(([k, v]) => [k, v])));
    out.push(table("Settings", null, Object.entries(data.settings).map(([k, v]) => [k, typeof v === "object" ? JSON.stringify(v) : String(v)])));
    at("figures").replaceChildren(...out);
    at("advice").replaceChildren(...(data.advice.length ? data.advice : [[0, "Nothing stands out that would bring memory back."]]).map(([n, words]) => { const li = document.createElement("li"); li.textContent = (n ? bytes(n) + " " : "") + words; return li; }));
  }
  function key() {
    const by = at("colour").value, box = at("segment-key"), of = { pool: data.pools, stream: data.streams };
    const items = of[by] ? of[by].slice(0, 12).map((n, i) => [n, COLOURS[i % COLOURS.length]]) : by === "age" ? [["oldest", "hsl(260 60% 52%)"], ["newest", "hsl(50 60% 52%)"]] : by === "owner" ? [["as in the hover", COLOURS[0]]] : [["live", css("--live")], ["pending", css("--pending")]];
    items.push(["free", css("--free")]);
    box.replaceChildren(...items.flatMap(([n, c]) => { const i = document.createElement("i"); i.style.background = c; return [i, n]; }));
  }

  // ---- putting it together ----
  function choose() {
    const d = data.devices[at("device").selectedIndex] || { device: 0, events: 0, times: [], oom: [], start: [], end: [], size: [], address: [], owner: [], pool: [], stream: [], made: [] };
    history = load(d);
    cursor = null;
    order = data.segments.filter((s) => s.device === d.device).sort((a, b) => b.size - a.size || a.address - b.address);
    at("spacer").style.height = Math.max(300, order.length * ROW) + "px";
    group(); all(); draw(); drawSegments();
  }
  data.devices.forEach((d) => { const o = document.createElement("option"); o.textContent = d.device; at("device").append(o); });
  at("device").addEventListener("change", choose);
  at("group").addEventListener("change", () => { group(); redraw(); });
  at("search").addEventListener("input", () => { group(); redraw(); drawSegments(); });
  at("colour").addEventListener("change", () => { key(); drawSegments(); });
  at("in").addEventListener("click", () => zoom(0.5)); at("out").addEventListener("click", () => zoom(2)); at("all").addEventListener("click", all);
  window.addEventListener("resize", () => { redraw(); drawSegments(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { key(); redraw(); drawSegments(); });
  // Where nobody said who allocates what, sizes tell more.
  if (data.owners.length <= 1) at("group").value = data.pools.length > 1 ? "pool" : "size";
  figures(); key(); choose();

  // With #measure in its address the page zooms and pans by itself for a while and says how long a frame took.
  if (location.hash === "#measure") {
    const times = [], drawing = [];
    let last = null, n = 0;
    const frame = (now) => {
      if (last !== null) times.push(now - last);
      last = now;
      const centre = history.n * (0.5 + 0.45 * Math.sin(n / 17)), span = history.n * (0.02 + 0.98 * Math.abs(Math.cos(n / 23)));
      view.from = centre - span / 2; view.to = centre + span / 2; clamp();
      const before = performance.now();
      draw();
      drawing.push(performance.now() - before);
      if (++n < 180) return requestAnimationFrame(frame);
      times.sort((a, b) => a - b); drawing.sort((a, b) => a - b);
      work.frameMs = { median: times[times.length >> 1], p95: times[Math.floor(times.length * 0.95)] };
      work.drawMs = { median: drawing[drawing.length >> 1], worst: drawing[drawing.length - 1] };
      all(); draw();
      work.measured = true;
      at("work").textContent = JSON.stringify(work);
    };
    requestAnimationFrame(frame);
  }
})();

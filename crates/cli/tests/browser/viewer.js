// A page that loads a snapshot the way PyTorch's memory viewer does, to see that the viewer can: the same opcodes and no others, the items of
// a list handed to one call, the timeline made of pairs, the states by going backwards from the last. Ours, for tests only.
"use strict";
const stop = (words) => { throw new Error(words); };

function unpickle(bytes) {
  const view = new DataView(bytes.buffer), text = new TextDecoder("utf-8", { fatal: true });
  const stack = [], marks = [], memo = [];
  let at = 0;
  const byte = () => bytes[at++];
  const word = () => { at += 4; return view.getUint32(at - 4, true); };
  const put = (value) => stack.push(value);
  const since = () => stack.splice(marks.pop());
  const string = (length) => { at += length; put(text.decode(bytes.subarray(at - length, at))); };
  const fill = (into, items) => { for (let n = 0; n < items.length; n += 2) into[items[n]] = items[n + 1]; };
  const top = () => stack[stack.length - 1];
  const pairs = { 0x85: 1, 0x86: 2, 0x87: 3 };
  for (;;) {
    if (at >= bytes.length) stop("the pickle does not end");
    const opcode = byte();
    switch (opcode < 0x80 ? String.fromCharCode(opcode) : opcode) {
      case 0x80: { const protocol = byte(); if (protocol < 2 || protocol > 4) stop("protocol " + protocol); break; }
      case 0x95: at += 8; break;
      case 0x94: memo.push(top()); break;
      case "q": memo[byte()] = top(); break;
      case "r": memo[word()] = top(); break;
      case "h": put(memo[byte()]); break;
      case "j": put(memo[word()]); break;
      case "(": marks.push(stack.length); break;
      case "}": put({}); break;
      case "]": case ")": put([]); break;
      case "t": case "l": put(since()); break;
      case 0x85: case 0x86: case 0x87: put(stack.splice(-pairs[opcode])); break;
      case "d": { const items = since(), made = {}; fill(made, items); put(made); break; }
      case "a": { const item = stack.pop(); top().push(item); break; }
      // As many arguments as items: what a browser bounds.
      case "e": { const items = since(); top().push(...items); break; }
      case "s": { const value = stack.pop(), key = stack.pop(); top()[key] = value; break; }
      case "u": { const items = since(); fill(top(), items); break; }
      case "J": at += 4; put(view.getInt32(at - 4, true)); break;
      case "K": put(byte()); break;
      case "M": at += 2; put(view.getUint16(at - 2, true)); break;
      case 0x8a: {
        const length = byte();
        let value = 0n;
        for (let n = 0; n < length; n++) value |= BigInt(byte()) << BigInt(8 * n);
        value = BigInt.asIntN(8 * length, value);
        put(length <= 8 ? Number(value) : value);
        break;
      }
      case "G": at += 8; put(view.getFloat64(at - 8)); break;
      case 0x8c: string(byte()); break;
      case "X": string(word()); break;
      case "N": put(null); break;
      case 0x88: put(true); break;
      case 0x89: put(false); break;
      case ".": if (stack.length !== 1) stop(stack.length + " values are left"); return stack.pop();
      default: stop("opcode " + opcode);
    }
  }
}

// Live bytes after each event, paired by address; what is live at the end and has no event was there from the beginning.
function timeline(snapshot, device) {
  const open = new Map(), sizes = [];
  let before = 0, now = 0;
  for (const e of snapshot.device_traces[device]) {
    if (e.action === "alloc") { open.set(e.addr, e.size); now += e.size; }
    else if (e.action === "free_completed") {
      if (!open.delete(e.addr)) before += e.size;
      now -= e.size;
    }
    sizes.push(now);
  }
  for (const s of snapshot.segments.filter((s) => s.device === device))
    for (const b of s.blocks) if (b.state === "active_allocated" && !open.has(b.address)) before += b.requested_size;
  return { peak: sizes.reduce((most, size) => Math.max(most, before + size), before), before };
}

// Goes from the last state back to the first: every event must undo something, and every block lie in a segment.
function backwards(snapshot, device) {
  const segments = [], blocks = new Map();
  for (const s of snapshot.segments.filter((s) => s.device === device)) {
    segments.push([s.address, s.total_size]);
    let at = s.address;
    for (const b of s.blocks) {
      if (b.state !== "inactive") blocks.set(at, { size: b.size, free: b.state === "active_pending_free" });
      at += b.size;
    }
    if (at !== s.address + s.total_size) stop("the blocks do not tile the segment at " + s.address);
  }
  segments.sort((a, b) => a[0] - b[0]);
  const first = (address) => { // the first segment that begins beyond an address
    let low = 0, high = segments.length;
    while (low < high) { const middle = (low + high) >> 1; if (segments[middle][0] > address) high = middle; else low = middle + 1; }
    return low;
  };
  const covered = (address, n) => {
    const s = segments[first(address) - 1];
    if (!s || address >= s[0] + s[1]) stop("the block at " + address + " lies in no segment after event " + n);
  };
  for (const address of blocks.keys()) covered(address, "last");
  const events = snapshot.device_traces[device];
  for (let n = events.length - 1; n >= 0; n--) {
    const e = events[n];
    switch (e.action) {
      case "alloc": if (!blocks.delete(e.addr)) stop("event " + n + " hands out what is not live"); break;
      case "free_completed":
        if (blocks.has(e.addr)) stop("event " + n + " frees what is live");
        blocks.set(e.addr, { size: e.size, free: true });
        covered(e.addr, n);
        break;
      case "free_requested": { const block = blocks.get(e.addr); if (!block) stop("event " + n + " frees what is not live"); block.free = false; break; }
      case "segment_alloc": {
        const s = segments[first(e.addr) - 1];
        if (!s || s[0] !== e.addr || s[1] !== e.size) stop("event " + n + " makes another segment than is there");
        segments.splice(first(e.addr) - 1, 1);
        break;
      }
      case "segment_free": segments.splice(first(e.addr), 0, [e.addr, e.size]); break;
      case "segment_map": { // mapped into a run that is larger by now
        const place = first(e.addr) - 1, s = segments[place], end = e.addr + e.size;
        if (!s || end > s[0] + s[1]) stop("event " + n + " maps what is not mapped");
        const rest = [[s[0], e.addr - s[0]], [end, s[0] + s[1] - end]].filter((r) => r[1] > 0);
        segments.splice(place, 1, ...rest);
        break;
      }
      case "segment_unmap": {
        let place = first(e.addr);
        segments.splice(place, 0, [e.addr, e.size]);
        if (place + 1 < segments.length && segments[place + 1][0] === e.addr + e.size) { segments[place][1] += segments[place + 1][1]; segments.splice(place + 1, 1); }
        if (place > 0 && segments[place - 1][0] + segments[place - 1][1] === e.addr) { segments[place - 1][1] += segments[place][1]; segments.splice(place, 1); }
        break;
      }
    }
  }
  return { blocksBefore: blocks.size, segmentsBefore: segments.length };
}

function draw(snapshot, device) {
  const canvas = document.getElementById("canvas"), g = canvas.getContext("2d");
  const { peak } = timeline(snapshot, device), events = snapshot.device_traces[device];
  let now = 0, drawn = 0;
  g.beginPath();
  events.forEach((e, n) => {
    now += e.action === "alloc" ? e.size : e.action === "free_completed" ? -e.size : 0;
    g.lineTo((n / events.length) * canvas.width, canvas.height * (1 - now / Math.max(1, peak)));
    drawn++;
  });
  g.stroke();
  return drawn;
}

const told = { devices: [] };
try {
  const bytes = Uint8Array.from(atob(document.getElementById("file").textContent), (c) => c.charCodeAt(0));
  const snapshot = unpickle(bytes);
  for (const [device, events] of snapshot.device_traces.entries()) {
    for (const e of events) {
      if (!("addr" in e || e.action === "oom")) stop("an event has no address");
      for (const f of e.frames || []) if (typeof f.name !== "string" || typeof f.filename !== "string") stop("a frame without a place");
    }
    const own = snapshot.segments.filter((s) => s.device === device);
    const sum = (of) => own.reduce((n, s) => n + of(s), 0);
    const live = (s) => s.blocks.reduce((n, b) => n + (b.state === "inactive" ? 0 : b.requested_size), 0);
    told.devices.push({ events: events.length, segments: own.length, reserved: sum((s) => s.total_size), requested: sum(live),
      drawn: draw(snapshot, device), ...timeline(snapshot, device), ...backwards(snapshot, device) });
  }
} catch (error) {
  told.error = String(error);
}
document.getElementById("work").textContent = JSON.stringify(told);

// Other allocators on a GPU under the same work as gpupool, measured on request.
//
//   peers              names what was built: one JSON object a line
//   peers NAME         measures on request: a line of standard input names a script and how it is to be run,
//                      `THREADS WARM_UP SPAN FILE`, in milliseconds, and is answered with one JSON object a line
//
// A script is a list of operations with nothing left to look up (benches/src/foreign.rs writes it): first what makes a
// peer ready, then a turn that is repeated. A fresh peer is made for each line, made ready, warmed up for two turns and
// for `WARM_UP`, and timed until `SPAN` has gone by, whole turns where the script says that turns must end. With several
// threads each has a stream and a turn of its own. Nothing runs on the GPU; the figure is host time.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "peer.h"

std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

namespace {

enum Kind : std::uint8_t { kAlloc, kFree, kFreeUsed, kBegin, kEnd, kEmptyCache };

struct Op {
  std::uint64_t bytes;   // of an allocation; the pool of a begin; which begin an end belongs to
  std::uint32_t slot;
  std::uint16_t stream;
  std::uint8_t kind;
  std::uint8_t unused;
};
static_assert(sizeof(Op) == 16);

struct Header {
  char magic[8];
  std::uint32_t slots, streams, first, turn;  // operations before the first turn, and of a turn
  std::uint32_t units;                        // pairs, steps or events of a turn
  std::uint32_t whole;                        // turns must end: what is left is freed, not timed
};

struct Script {
  Header header;
  std::vector<Op> ops;
};

bool read(const std::string& path, Script& script) {
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(&script.header), sizeof(Header));
  if (!file || std::memcmp(script.header.magic, "gpscript", 8) != 0) return false;
  script.ops.resize(std::size_t{script.header.first} + script.header.turn);
  file.read(reinterpret_cast<char*>(script.ops.data()), static_cast<std::streamsize>(script.ops.size() * sizeof(Op)));
  return static_cast<bool>(file);
}

struct Block {
  void* at = nullptr;
  std::size_t bytes = 0;
  std::uint16_t stream = 0;
};

// A peer in the middle of a script.
struct Running {
  Peer& peer;
  const Script& script;
  std::vector<cudaStream_t> streams;
  cudaStream_t other;
  std::vector<Block> slots;
  std::vector<std::uint64_t> pools;  // of the begins of this turn
  std::vector<bool> ended;
  std::uint64_t turns = 0, refused = 0;
  std::size_t at = 0;  // the next operation of the turn

  Running(Peer& peer, const Script& script, std::size_t streams_wanted)
      : peer(peer), script(script), streams(streams_wanted), slots(script.header.slots) {
    for (auto& stream : streams) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
    run(0, script.header.first);
  }

  ~Running() {
    finish_turn();
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    peer.empty_cache();
    for (auto stream : streams) check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    check(cudaStreamDestroy(other), "cudaStreamDestroy");
  }

  void run(std::size_t from, std::size_t to) {
    for (std::size_t n = from; n < to; ++n) {
      const Op& op = script.ops[n];
      switch (op.kind) {
        case kAlloc: {
          void* block = peer.alloc(op.bytes, streams[op.stream]);
          if (block == nullptr) ++refused;
          slots[op.slot] = {block, op.bytes, op.stream};
          break;
        }
        case kFree:
        case kFreeUsed: {
          Block& block = slots[op.slot];
          if (block.at == nullptr) break;
          if (op.kind == kFree) peer.free(block.at, block.bytes, streams[block.stream]);
          else peer.free_used(block.at, block.bytes, streams[block.stream], other);
          block.at = nullptr;
          break;
        }
        case kBegin:
          pools.push_back(1 + op.bytes + (turns << 20));
          ended.push_back(false);
          peer.begin_pool(pools.back(), streams[op.stream]);
          break;
        case kEnd: end(op.bytes); break;
        case kEmptyCache: peer.empty_cache(); break;
      }
    }
  }

  void end(std::size_t nth) {
    if (nth >= pools.size() || ended[nth]) return;
    ended[nth] = true;
    peer.end_pool(pools[nth]);
  }

  // Frees what a turn left, and drops its pools.
  void finish_turn() {
    for (Block& block : slots) {
      if (block.at != nullptr) peer.free(block.at, block.bytes, streams[block.stream]);
      block.at = nullptr;
    }
    for (std::size_t n = 0; n < pools.size(); ++n) end(n);
    for (std::uint64_t pool : pools) peer.drop_pool(pool);
    pools.clear();
    ended.clear();
    ++turns;
  }

  struct Done {
    std::chrono::nanoseconds took{0};
    double units = 0;
  };

  // A turn, or of one that need not end a part that ends with it at the latest.
  Done go_on(std::size_t at_once) {
    using Clock = std::chrono::steady_clock;
    const std::size_t first = script.header.first, turn = script.header.turn;
    const std::size_t n = script.header.whole ? turn : std::min(at_once, turn - at);
    const auto start = Clock::now();
    run(first + at, first + at + n);
    const Done done{Clock::now() - start, double(n) * double(script.header.units) / double(turn)};
    at = (at + n) % turn;
    if (script.header.whole) finish_turn();
    return done;
  }

  void warm_up() {
    for (unsigned turns = 0; turns < 2; ++turns) go_on(script.header.turn);
  }

  // Goes on until so much time has been timed.
  Done run_for(std::chrono::nanoseconds span) {
    // Pairs and steps are two operations: a look at the clock for a thousand of them.
    constexpr std::size_t kBetweenLooks = 2000;
    Done all;
    while (all.took < span) {
      const Done done = go_on(kBetweenLooks);
      all.took += done.took;
      all.units += done.units;
    }
    return all;
  }
};

// Nanoseconds from one unit of a thread to its next; of several threads from the first beginning to the last end.
double measure(const Entry& entry, const Script& script, unsigned threads, std::chrono::nanoseconds warm_up,
               std::chrono::nanoseconds span) {
  using Clock = std::chrono::steady_clock;
  const auto peer = entry.make();
  std::vector<std::unique_ptr<Running>> running;
  for (unsigned n = 0; n < threads; ++n) {
    running.push_back(std::make_unique<Running>(*peer, script, script.header.streams));
    running.back()->warm_up();
  }
  double units = 0;
  std::chrono::nanoseconds took{0};
  if (threads == 1) {
    running[0]->run_for(warm_up);
    const auto done = running[0]->run_for(span);
    units = done.units, took = done.took;
  } else {
    std::atomic<unsigned> warm{0}, ready{0};
    std::vector<Clock::time_point> begins(threads), ends(threads);
    std::vector<double> done(threads);
    std::vector<std::thread> workers;
    const auto together = [threads](std::atomic<unsigned>& arrived) {
      arrived.fetch_add(1);
      while (arrived.load() < threads) {}
    };
    for (unsigned n = 0; n < threads; ++n) {
      workers.emplace_back([&, n] {
        check(cudaSetDevice(0), "cudaSetDevice");
        together(warm);
        running[n]->run_for(warm_up);
        together(ready);
        begins[n] = Clock::now();
        done[n] = running[n]->run_for(span).units;
        ends[n] = Clock::now();
      });
    }
    for (auto& worker : workers) worker.join();
    took = *std::max_element(ends.begin(), ends.end()) - *std::min_element(begins.begin(), begins.end());
    for (double one : done) units += one;
  }
  for (const auto& one : running) if (one->refused) throw std::runtime_error("requests were refused");
  return double(took.count()) * threads / units;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    for (const Entry& entry : entries()) {
      std::cout << "{\"peer\": \"" << entry.name << "\", \"version\": \"" << entry.version << "\"}\n";
    }
    return 0;
  }
  const Entry* entry = nullptr;
  for (const Entry& one : entries()) if (one.name == arguments[1]) entry = &one;
  if (entry == nullptr) {
    std::cerr << "no peer " << arguments[1] << "\n";
    return 2;
  }
  check(cudaSetDevice(0), "cudaSetDevice");
  check(cudaFree(nullptr), "cudaFree");
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    unsigned threads = 0;
    std::int64_t warm_up = 0, span = 0;
    std::string path;
    Script script;
    words >> threads >> warm_up >> span >> std::ws;
    std::getline(words, path);
    if (threads == 0 || warm_up < 0 || span <= 0 || !read(path, script)) {
      std::cout << "{\"error\": \"not a script: " << path << "\"}" << std::endl;
      continue;
    }
    try {
      std::cout << "{\"ns\": " << measure(*entry, script, threads, std::chrono::milliseconds(warm_up), std::chrono::milliseconds(span)) << "}" << std::endl;
    } catch (const std::exception& error) {
      std::string what = error.what();
      for (char& letter : what) if (letter == '"' || letter == '\\' || letter < ' ') letter = ' ';
      std::cout << "{\"error\": \"" << what.substr(0, 300) << "\"}" << std::endl;
    }
  }
  // The driver may be gone before what is static: leave without destructors.
  std::cout.flush();
  std::_Exit(0);
}

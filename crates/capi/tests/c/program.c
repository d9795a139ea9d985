/* Uses every part of gpupool's C ABI and looks at every result: program SNAPSHOT [DEVICE], on the simulated device or, with cuda:0, a GPU. */
#include "gpupool.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((uint64_t)1 << 20)

static void fail(int line, const char *what) {
    fprintf(stderr, "line %d: %s (status %d: %s)\n", line, what, gpupool_last_status(), gpupool_last_error());
    exit(1);
}
#define CHECK(condition) do { if (!(condition)) fail(__LINE__, #condition); } while (0)
#define OK(call) CHECK((call) == GPUPOOL_STATUS_OK)
/* The call fails with this status, and the last error speaks of `word`. */
#define FAILS(call, status, word) \
    do { CHECK((call) == (status)); CHECK(gpupool_last_status() == (status)); CHECK(strstr(gpupool_last_error(), (word))); } while (0)

static int64_t stat_of(gpupool_allocator a, const char *name) {
    int64_t value = -1;
    OK(gpupool_stat(a, name, &value));
    return value;
}

static uint32_t word_at(gpupool_allocator a, void *stream, void *address) {
    unsigned char bytes[4];
    OK(gpupool_bench_read(a, stream, address, bytes, sizeof bytes));
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static void creating(void) {
    gpupool_allocator a = 0;
    CHECK(gpupool_abi_version() / 1000 == 1);
    CHECK(gpupool_last_status() == GPUPOOL_STATUS_OK && gpupool_last_error()[0] == 0);
    FAILS(gpupool_create("sim", NULL, NULL), GPUPOOL_STATUS_INVALID_ARGUMENT, "null");
    FAILS(gpupool_create("tpu", NULL, &a), GPUPOOL_STATUS_INVALID_ARGUMENT, "tpu");
    FAILS(gpupool_create("sim:many", NULL, &a), GPUPOOL_STATUS_INVALID_ARGUMENT, "many");
    FAILS(gpupool_create("sim", "memory_limt=1GiB", &a), GPUPOOL_STATUS_INVALID_ARGUMENT, "memory_limit");
    FAILS(gpupool_create("sim", "policy=\xff", &a), GPUPOOL_STATUS_INVALID_ARGUMENT, "UTF-8");
    CHECK(a == 0);
    FAILS(gpupool_destroy(12345), GPUPOOL_STATUS_UNKNOWN_HANDLE, "12345");
    FAILS(gpupool_empty_cache(0, NULL), GPUPOOL_STATUS_UNKNOWN_HANDLE, "allocator");
}

static void blocks(gpupool_allocator a, void *stream, void *other) {
    void *p = NULL, *q = NULL, *base = NULL;
    uint64_t size = 0, bytes = 0;
    OK(gpupool_alloc(a, 3 * MIB, stream, &p));
    CHECK(p != NULL && (uintptr_t)p % 512 == 0);
    OK(gpupool_block_size(a, p, &size));
    CHECK(size >= 3 * MIB);
    OK(gpupool_base_allocation(a, (char *)p + MIB, &base, &bytes));
    CHECK((char *)base <= (char *)p + MIB && (char *)base + bytes > (char *)p + MIB);
    OK(gpupool_bench_fill(a, stream, p, 3 * MIB, 7));
    CHECK(word_at(a, stream, (char *)p + 2 * MIB) == 7);

    /* Nothing but the start of a live block can be freed, once. */
    FAILS(gpupool_free(a, (char *)p + 512), GPUPOOL_STATUS_NOT_LIVE, "not the start of a live block");
    OK(gpupool_free(a, p));
    FAILS(gpupool_free(a, p), GPUPOOL_STATUS_NOT_LIVE, "not the start of a live block");
    FAILS(gpupool_free(a, &size), GPUPOOL_STATUS_NOT_LIVE, "not the start of a live block");
    FAILS(gpupool_record_stream(a, p, other), GPUPOOL_STATUS_NOT_LIVE, "not the start of a live block");
    FAILS(gpupool_block_size(a, p, &size), GPUPOOL_STATUS_NOT_LIVE, "not the start of a live block");
    OK(gpupool_free(a, NULL));
    OK(gpupool_alloc(a, 0, stream, &q));
    CHECK(q == NULL);

    /* The same stream gets the same memory again; with a use recorded on another it does not, until that is done. */
    OK(gpupool_alloc(a, 3 * MIB, stream, &q));
    CHECK(q == p);
    OK(gpupool_record_stream(a, q, other));
    OK(gpupool_bench_add(a, stream, q, 3 * MIB, 1));
    OK(gpupool_free(a, q));
    OK(gpupool_bench_synchronize(a, other));
    OK(gpupool_bench_synchronize(a, stream));

    /* Out of memory says so, and changes nothing. */
    FAILS(gpupool_alloc(a, (uint64_t)1 << 50, stream, &base), GPUPOOL_STATUS_OUT_OF_MEMORY, "ut of memory");
    OK(gpupool_set_memory_limit(a, 64 * MIB));
    FAILS(gpupool_alloc(a, 100 * MIB, stream, &p), GPUPOOL_STATUS_OUT_OF_MEMORY, "ut of memory");
    OK(gpupool_set_memory_limit(a, UINT64_MAX));
    FAILS(gpupool_set_memory_fraction(a, 1.5), GPUPOOL_STATUS_INVALID_ARGUMENT, "memory_fraction");
    OK(gpupool_set_memory_fraction(a, 1.0));
}

static void captures(gpupool_allocator a, void *stream) {
    const gpupool_pool fresh = {0, 0};
    gpupool_capture capture = 0;
    gpupool_graph graph = 0, second = 0;
    gpupool_exec exec = 0, both = 0;
    gpupool_pool pool = {0, 0};
    gpupool_graph_info info;
    void *out = NULL, *scratch = NULL, *again = NULL;
    int64_t reserved = 0, allocated = 0;

    OK(gpupool_alloc(a, MIB, stream, &out));
    FAILS(gpupool_capture_begin(a, stream, fresh, 9, &capture), GPUPOOL_STATUS_INVALID_ARGUMENT, "9");
    OK(gpupool_capture_begin(a, stream, fresh, GPUPOOL_CAPTURE_GLOBAL, &capture));
    OK(gpupool_capture_pool(capture, &pool));
    CHECK(pool.capture != 0 && pool.user == 0);
    OK(gpupool_alloc(a, MIB, stream, &scratch));
    OK(gpupool_bench_fill(a, stream, scratch, MIB, 40));
    OK(gpupool_bench_add(a, stream, scratch, MIB, 2));
    OK(gpupool_bench_copy(a, stream, out, scratch, MIB));
    OK(gpupool_free(a, scratch));
    OK(gpupool_capture_end(capture, &graph));
    FAILS(gpupool_capture_end(capture, &second), GPUPOOL_STATUS_UNKNOWN_HANDLE, "ended once");
    OK(gpupool_graph_get_info(graph, &info));
    CHECK(info.nodes == 3 && info.memory_nodes == 0 && info.pool.capture == pool.capture);

    /* The graph's memory is nobody else's. */
    OK(gpupool_alloc(a, MIB, stream, &again));
    CHECK(again != scratch);
    OK(gpupool_free(a, again));

    /* Another graph in the same pool, and launches of both in turn. */
    OK(gpupool_capture_begin(a, stream, pool, GPUPOOL_CAPTURE_THREAD_LOCAL, &capture));
    OK(gpupool_alloc(a, MIB, stream, &again));
    CHECK(again == scratch);
    OK(gpupool_bench_fill(a, stream, again, MIB, 5));
    OK(gpupool_bench_copy(a, stream, out, again, MIB));
    OK(gpupool_free(a, again));
    OK(gpupool_capture_end(capture, &second));
    OK(gpupool_pool_bytes(a, pool, &reserved, &allocated));
    CHECK(reserved >= (int64_t)MIB && allocated == 0);
    OK(gpupool_graph_instantiate(graph, &exec));
    OK(gpupool_graph_instantiate(second, &both));
    for (int turn = 0; turn < 100; turn++) {
        OK(gpupool_exec_launch(exec, stream));
        CHECK(word_at(a, stream, out) == 42);
        OK(gpupool_exec_launch(both, stream));
        CHECK(word_at(a, stream, out) == 5);
    }
    /* A capture that is given up leaves the stream as it was. */
    OK(gpupool_capture_begin(a, stream, fresh, GPUPOOL_CAPTURE_RELAXED, &capture));
    OK(gpupool_capture_abandon(capture));
    FAILS(gpupool_capture_abandon(capture), GPUPOOL_STATUS_UNKNOWN_HANDLE, "ended once");
    OK(gpupool_bench_fill(a, stream, out, MIB, 1));
    CHECK(word_at(a, stream, out) == 1);

    OK(gpupool_graph_destroy(graph));
    FAILS(gpupool_graph_destroy(graph), GPUPOOL_STATUS_UNKNOWN_HANDLE, "graph");
    OK(gpupool_exec_launch(exec, stream));
    CHECK(word_at(a, stream, out) == 42);
    OK(gpupool_exec_destroy(exec));
    FAILS(gpupool_exec_launch(exec, stream), GPUPOOL_STATUS_UNKNOWN_HANDLE, "executable");
    OK(gpupool_exec_destroy(both));
    OK(gpupool_graph_destroy(second));
    OK(gpupool_free(a, out));
}

static bool is_wanted(void *context, void *stream) { return *(void **)context == stream; }
static int released = 0;
static void count_release(void *context) { (void)context; released++; }

static void pools(gpupool_allocator a, void *stream, void *other) {
    gpupool_pool pool = {0, 0};
    void *inside = NULL, *outside = NULL, *wanted = stream, *base = NULL;
    int64_t reserved = 0, allocated = 0;
    uint64_t bytes = 0;

    /* What is registered or exported lies in one driver allocation. */
    OK(gpupool_pool_create(a, &pool));
    OK(gpupool_pool_whole_segments(a, pool));
    OK(gpupool_pool_begin(a, pool, is_wanted, &wanted, NULL));
    OK(gpupool_alloc(a, 3 * MIB, stream, &inside));
    OK(gpupool_pool_end(a, pool));
    OK(gpupool_base_allocation(a, (char *)inside + 2 * MIB, &base, &bytes));
    CHECK((char *)base <= (char *)inside && (char *)base + bytes >= (char *)inside + 3 * MIB);
    OK(gpupool_free(a, inside));
    OK(gpupool_pool_release(a, pool));
    OK(gpupool_pool_release(a, pool));
    OK(gpupool_pool_create(a, &pool));
    FAILS(gpupool_pool_end(a, pool), GPUPOOL_STATUS_POOL, "not currently recording");
    OK(gpupool_pool_begin(a, pool, is_wanted, &wanted, count_release));
    OK(gpupool_alloc(a, MIB, stream, &inside));
    OK(gpupool_alloc(a, MIB, other, &outside));
    OK(gpupool_pool_end(a, pool));
    CHECK(released == 1);
    OK(gpupool_pool_bytes(a, pool, &reserved, &allocated));
    CHECK(allocated == (int64_t)MIB);
    OK(gpupool_free(a, inside));
    OK(gpupool_free(a, outside));
    OK(gpupool_pool_release(a, pool));
    OK(gpupool_pool_release(a, pool));
    OK(gpupool_empty_cache(a, NULL));
    FAILS(gpupool_pool_bytes(a, pool, &reserved, &allocated), GPUPOOL_STATUS_POOL, "no pool");
}

static void figures(gpupool_allocator a, const char *path) {
    char small[8], *json;
    size_t needed = 0, again = 0;
    FAILS(gpupool_stat(a, "reserved_bytes.all.nonsense", NULL), GPUPOOL_STATUS_INVALID_ARGUMENT, "nonsense");
    OK(gpupool_stats_json(a, NULL, 0, &needed));
    OK(gpupool_stats_json(a, small, sizeof small, &again));
    CHECK(again == needed && strlen(small) == sizeof small - 1 && small[0] == '{');
    json = malloc(needed);
    OK(gpupool_stats_json(a, json, needed, &again));
    CHECK(strlen(json) + 1 == needed && json[needed - 2] == '}' && strstr(json, "\"num_ooms\":2"));
    free(json);
    FAILS(gpupool_snapshot(a, "/no/such/folder/x.json"), GPUPOOL_STATUS_IO, "/no/such/folder");
    OK(gpupool_snapshot(a, path));
}

int main(int argc, char **argv) {
    gpupool_allocator a = 0;
    void *stream = NULL, *other = NULL, *kept = NULL;
    uint64_t bytes = 0;
    CHECK(argc == 2 || argc == 3);
    const char *device = argc == 3 ? argv[2] : "sim:4294967296";
    creating();
    OK(gpupool_create(device, "memory_fraction=1.0", &a));
    OK(gpupool_bench_stream_create(a, &stream));
    OK(gpupool_bench_stream_create(a, &other));
    blocks(a, stream, other);
    captures(a, stream);
    pools(a, stream, other);
    OK(gpupool_alloc(a, 1000, stream, &kept));
    figures(a, argv[1]);
    OK(gpupool_free(a, kept));
    OK(gpupool_bench_stream_destroy(a, other));
    OK(gpupool_empty_cache(a, &bytes));
    OK(gpupool_trim(a, NULL));
    CHECK(stat_of(a, "reserved_bytes.all.current") == 0);
    OK(gpupool_available(a, &bytes));
    CHECK(argc == 3 ? bytes > 0 : bytes == (uint64_t)4 << 30);
    CHECK(stat_of(a, "allocation.all.allocated") > 0);
    OK(gpupool_reset_peaks(a));
    OK(gpupool_reset_accumulated(a));
    CHECK(stat_of(a, "reserved_bytes.all.peak") == 0 && stat_of(a, "allocation.all.allocated") == 0);
    OK(gpupool_destroy(a));
    FAILS(gpupool_destroy(a), GPUPOOL_STATUS_UNKNOWN_HANDLE, "destroyed before");
    FAILS(gpupool_alloc(a, 1, stream, &kept), GPUPOOL_STATUS_UNKNOWN_HANDLE, "allocator");
    printf("all is well\n");
    return 0;
}

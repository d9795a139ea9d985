/* Calls in the wrong order, with the wrong handles, from the wrong threads, on the simulated device: each is an error that says so, and what
 * is used rightly goes on as if nothing had happened. */
#include "gpupool.h"

#include <pthread.h>
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
#define FAILS(call, status, word) \
    do { CHECK((call) == (status)); CHECK(strstr(gpupool_last_error(), (word))); } while (0)

static const gpupool_pool none = {0, 0};
static gpupool_allocator a, other;

static int64_t stat_of(gpupool_allocator of, const char *name) {
    int64_t value = -1;
    OK(gpupool_stat(of, name, &value));
    return value;
}

static void *stream(void) {
    void *made = NULL;
    OK(gpupool_bench_stream_create(a, &made));
    return made;
}

/* A stream that is none poisons nothing: the call that names it fails, and no other. */
static void streams(void) {
    void *s = stream(), *t = stream(), *wrong = (void *)0xdeadbeef, *p = NULL, *q = NULL;
    FAILS(gpupool_alloc(a, 1000, wrong, &p), GPUPOOL_STATUS_INVALID_ARGUMENT, "0xdeadbeef is no stream");
    CHECK(p == NULL);
    OK(gpupool_alloc(a, 3 * MIB, s, &p));
    FAILS(gpupool_record_stream(a, p, wrong), GPUPOOL_STATUS_INVALID_ARGUMENT, "no stream");
    OK(gpupool_stream_retired(a, wrong)); /* never named here: nothing to settle */
    OK(gpupool_free(a, p));
    OK(gpupool_empty_cache(a, NULL));
    OK(gpupool_alloc(a, 3 * MIB, t, &q));
    OK(gpupool_free(a, q));
    OK(gpupool_stream_retired(a, s));
    OK(gpupool_stream_retired(a, s));
    OK(gpupool_bench_stream_destroy(a, t));
    FAILS(gpupool_alloc(a, 1000, t, &q), GPUPOOL_STATUS_INVALID_ARGUMENT, "was it destroyed");
}

static void nulls(void) {
    void *p = NULL;
    gpupool_allocator made;
    FAILS(gpupool_create("sim:0", NULL, &made), GPUPOOL_STATUS_INVALID_ARGUMENT, "1 TiB");
    FAILS(gpupool_create("sim:18446744073709551615", NULL, &made), GPUPOOL_STATUS_INVALID_ARGUMENT, "1 TiB");
    FAILS(gpupool_create(NULL, NULL, &made), GPUPOOL_STATUS_INVALID_ARGUMENT, "use sim");
    FAILS(gpupool_alloc(a, 1000, NULL, NULL), GPUPOOL_STATUS_INVALID_ARGUMENT, "null");
    FAILS(gpupool_base_allocation(a, NULL, &p, NULL), GPUPOOL_STATUS_INVALID_ARGUMENT, "null");
    FAILS(gpupool_snapshot(a, NULL), GPUPOOL_STATUS_INVALID_ARGUMENT, "the path is null or empty");
    FAILS(gpupool_stat(a, NULL, NULL), GPUPOOL_STATUS_INVALID_ARGUMENT, "the figure's name is null or empty");
    OK(gpupool_free(a, NULL));
    OK(gpupool_record_stream(a, NULL, NULL));
}

static bool claims(void *context, void *which) { (void)context; (void)which; return true; }
static void count(void *context) { ++*(int *)context; }

/* Whoever gives a context gets it back, once, however the call goes. */
static void scopes(void) {
    int released = 0;
    void *s = stream(), *p = NULL, *q = NULL;
    gpupool_pool pool, unknown = {0, 777};
    OK(gpupool_pool_create(a, &pool));
    FAILS(gpupool_pool_begin(12345, pool, claims, &released, count), GPUPOOL_STATUS_UNKNOWN_HANDLE, "12345");
    FAILS(gpupool_pool_begin(a, none, claims, &released, count), GPUPOOL_STATUS_POOL, "default pool");
    CHECK(released == 2);
    OK(gpupool_pool_begin(a, pool, NULL, &released, count));
    OK(gpupool_pool_end(a, pool));
    CHECK(released == 3);
    FAILS(gpupool_pool_end(a, pool), GPUPOOL_STATUS_POOL, "not currently recording");
    FAILS(gpupool_pool_release(a, unknown), GPUPOOL_STATUS_POOL, "no pool");
    /* Released as often as it was taken while its scope is still open. */
    OK(gpupool_pool_begin(a, pool, claims, &released, count));
    OK(gpupool_alloc(a, 5000, s, &p));
    OK(gpupool_pool_release(a, pool));
    OK(gpupool_pool_release(a, pool));
    OK(gpupool_pool_release(a, pool));
    CHECK(gpupool_pool_release(a, pool) == GPUPOOL_STATUS_POOL);
    OK(gpupool_alloc(a, 5000, s, &q));
    CHECK(p != q);
    OK(gpupool_pool_end(a, pool));
    OK(gpupool_free(a, q));
    OK(gpupool_free(a, p));
    CHECK(released == 4);
}

static gpupool_capture begun;
static void *end_elsewhere(void *unused) {
    gpupool_graph graph;
    (void)unused;
    FAILS(gpupool_capture_end(begun, &graph), GPUPOOL_STATUS_UNKNOWN_HANDLE, "by the thread that began it");
    return NULL;
}
static void *left;
static void *begin_and_leave(void *on) {
    gpupool_capture capture;
    OK(gpupool_capture_begin(a, on, none, GPUPOOL_CAPTURE_RELAXED, &capture));
    OK(gpupool_alloc(a, 5000, on, &left));
    return NULL;
}

static void captures(void) {
    void *s = stream(), *t = stream(), *p = NULL;
    gpupool_capture second;
    gpupool_graph graph, again;
    gpupool_exec exec;
    gpupool_hold hold;
    pthread_t thread;
    OK(gpupool_capture_begin(a, s, none, GPUPOOL_CAPTURE_RELAXED, &begun));
    CHECK(gpupool_capture_begin(a, s, none, GPUPOOL_CAPTURE_RELAXED, &second) != GPUPOOL_STATUS_OK);
    CHECK(gpupool_capture_adopt(a, s, none, &second, NULL) == GPUPOOL_STATUS_CAPTURE);
    FAILS(gpupool_capture_adopt(a, t, none, &second, NULL), GPUPOOL_STATUS_CAPTURE, "nothing to adopt");
    CHECK(!pthread_create(&thread, NULL, end_elsewhere, NULL) && !pthread_join(thread, NULL));
    OK(gpupool_alloc(a, 5000, s, &p));
    OK(gpupool_bench_fill(a, s, p, 5000, 1));
    CHECK(gpupool_stream_retired(a, s) == GPUPOOL_STATUS_DRIVER);
    CHECK(gpupool_bench_stream_destroy(a, s) == GPUPOOL_STATUS_DRIVER);
    CHECK(gpupool_capture_end(begun, NULL) == GPUPOOL_STATUS_INVALID_ARGUMENT);
    OK(gpupool_capture_end(begun, &graph));
    FAILS(gpupool_capture_end(begun, &again), GPUPOOL_STATUS_UNKNOWN_HANDLE, "ended once");
    FAILS(gpupool_adopted_finish(begun, &hold), GPUPOOL_STATUS_UNKNOWN_HANDLE, "no capture");
    OK(gpupool_graph_instantiate(graph, &exec));
    /* A number of one kind is none of another. */
    FAILS(gpupool_exec_launch(graph, s), GPUPOOL_STATUS_UNKNOWN_HANDLE, "executable");
    FAILS(gpupool_hold_release(exec), GPUPOOL_STATUS_UNKNOWN_HANDLE, "hold");
    FAILS(gpupool_destroy(graph), GPUPOOL_STATUS_UNKNOWN_HANDLE, "allocator");
    FAILS(gpupool_exec_launch(exec, (void *)0xbad), GPUPOOL_STATUS_INVALID_ARGUMENT, "0xbad is no stream");
    OK(gpupool_exec_launch(exec, s));
    OK(gpupool_graph_destroy(graph));
    FAILS(gpupool_graph_instantiate(graph, &exec), GPUPOOL_STATUS_UNKNOWN_HANDLE, "graph");
    OK(gpupool_exec_launch(exec, t));
    OK(gpupool_exec_destroy(exec));
    OK(gpupool_free(a, p));
    /* A thread that ends leaves no capture behind. */
    CHECK(!pthread_create(&thread, NULL, begin_and_leave, t) && !pthread_join(thread, NULL));
    OK(gpupool_alloc(a, 5000, t, &p));
    CHECK(p != left);
    OK(gpupool_free(a, p));
    OK(gpupool_free(a, left));
}

static void *shared;
static void *free_often(void *won) {
    for (int i = 0; i < 2000; i++) *(int *)won += gpupool_free(a, shared) == GPUPOOL_STATUS_OK;
    return NULL;
}
static void *churn(void *on) {
    for (uint64_t i = 0; i < 2000; i++) {
        void *p;
        OK(gpupool_alloc(a, 1000 + i * 70, on, &p));
        if (i % 3 == 0) OK(gpupool_record_stream(a, p, NULL));
        OK(gpupool_free(a, p));
    }
    return NULL;
}

static void threads(void) {
    pthread_t all[4];
    int won[4] = {0};
    void *s = stream();
    for (int i = 0; i < 4; i++) CHECK(!pthread_create(&all[i], NULL, churn, i < 2 ? s : stream()));
    for (int i = 0; i < 4; i++) CHECK(!pthread_join(all[i], NULL));
    OK(gpupool_alloc(a, 5000, s, &shared));
    for (int i = 0; i < 4; i++) CHECK(!pthread_create(&all[i], NULL, free_often, &won[i]));
    for (int i = 0; i < 4; i++) CHECK(!pthread_join(all[i], NULL));
    CHECK(won[0] + won[1] + won[2] + won[3] == 1);
}

/* An allocator that is destroyed while a graph of it lives, and while one is captured. */
static void destroyed(void) {
    int released = 0;
    void *s = stream(), *t = stream(), *p = NULL, *q = NULL;
    gpupool_capture capture;
    gpupool_graph graph;
    gpupool_exec exec;
    gpupool_pool pool;
    FAILS(gpupool_free(other, (void *)0x700000000000), GPUPOOL_STATUS_NOT_LIVE, "not the start of a live block");
    OK(gpupool_pool_create(a, &pool));
    OK(gpupool_pool_begin(a, pool, NULL, &released, count));
    OK(gpupool_alloc(a, 300 * MIB, s, &q));
    OK(gpupool_capture_begin(a, t, none, GPUPOOL_CAPTURE_RELAXED, &capture));
    OK(gpupool_alloc(a, 5000, t, &p));
    OK(gpupool_bench_fill(a, t, p, 5000, 1));
    OK(gpupool_destroy(a));
    CHECK(released == 1);
    FAILS(gpupool_destroy(a), GPUPOOL_STATUS_UNKNOWN_HANDLE, "destroyed before");
    FAILS(gpupool_alloc(a, 5000, t, &p), GPUPOOL_STATUS_UNKNOWN_HANDLE, "destroyed before");
    FAILS(gpupool_free(a, q), GPUPOOL_STATUS_UNKNOWN_HANDLE, "destroyed before");
    OK(gpupool_capture_end(capture, &graph));
    OK(gpupool_graph_instantiate(graph, &exec));
    OK(gpupool_exec_launch(exec, s));
    OK(gpupool_graph_destroy(graph));
    OK(gpupool_exec_destroy(exec));
    CHECK(stat_of(other, "reserved_bytes.all.current") == 0);
}

int main(void) {
    OK(gpupool_create("sim:4294967296", NULL, &a));
    OK(gpupool_create("sim", NULL, &other));
    streams();
    nulls();
    scopes();
    captures();
    threads();
    CHECK(stat_of(a, "allocated_bytes.all.current") == 0);
    destroyed();
    OK(gpupool_destroy(other));
    puts("all is well");
    return 0;
}

/* libcudart's copies and fills, and the graphs that are captured of them.
 *
 * Does: copies and fills, refused where a pointer lies on the wrong side, done at once whatever the stream; but those
 * on the driver's streams that wait for no other as late as may be, when somebody waits for that stream: who reads what
 * they write without having waited reads what was there, and who writes over what they read has that copied. Stream
 * capture, which records copies and fills for later launches, and refuses what CUDA refuses while it lasts.
 * Does not: check that what a graph repeats still exists.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Stream capture: one at a time in a process, whichever threads there are. A graph is a list of the copies and fills to repeat. */

typedef struct {
    void *to;
    const void *from; /* NULL: a fill */
    int value;
    size_t size;
} Operation;

typedef struct {
    Operation *operations;
    size_t count, room;
} Graph;

static Graph *captured = NULL;
static void *captured_stream = NULL;
static int captured_strictly = 0; /* the mode forbids what could wait, or allocate */
static int captured_badly = 0;

static int record(Operation operation) {
    if (captured->count == captured->room) {
        captured->room = captured->room ? 2 * captured->room : 64;
        captured->operations = realloc(captured->operations, captured->room * sizeof(Operation));
    }
    captured->operations[captured->count++] = operation;
    return SUCCESS;
}

static int perform(Operation operation) {
    if (operation.from) memmove(operation.to, operation.from, operation.size);
    else memset(operation.to, operation.value, operation.size);
    return SUCCESS;
}

static int spoilt_by(const char *call) {
    fprintf(stderr, "fake cuda: %s while a stream is captured\n", call);
    captured_badly = 1;
    return 1;
}

/* Whether a capture is going on that a call must not disturb; it is spoilt then, as in CUDA. */
int fakeForbidden(const char *call) { return captured && captured_strictly && spoilt_by(call); }

/* The captured stream runs nothing: whoever waits for it has made a mistake, in any mode. */
static int forbidden_wait(const char *call, const void *stream) {
    return captured && stream == captured_stream && spoilt_by(call);
}

int cudaStreamBeginCapture(void *stream, int mode) {
    if (captured || stream == NULL || stream == (void *)1) return fakeFailed(CAPTURE_UNSUPPORTED); /* legacy stream */
    TRACE("begin capture\n");
    captured = calloc(1, sizeof(Graph));
    captured_stream = stream;
    captured_strictly = mode != 2; /* 2: relaxed */
    captured_badly = 0;
    return SUCCESS;
}

int cudaStreamEndCapture(void *stream, void **graph) {
    if (!captured || stream != captured_stream) return fakeFailed(INVALID_VALUE);
    TRACE("end capture: %zu operations\n", captured->count);
    *graph = captured_badly ? NULL : captured;
    captured = NULL;
    captured_stream = NULL;
    return captured_badly ? fakeFailed(CAPTURE_INVALIDATED) : SUCCESS;
}

int cudaStreamIsCapturing(void *stream, int *status) {
    *status = captured && stream == captured_stream;
    return SUCCESS;
}

int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    *executable = graph; /* shared: neither is freed */
    return graph ? SUCCESS : fakeFailed(INVALID_VALUE);
}

int cudaGraphLaunch(void *executable, void *stream) {
    (void)stream;
    Graph *graph = executable;
    TRACE("graph launch: %zu operations\n", graph->count);
    for (size_t i = 0; i < graph->count; i++) perform(graph->operations[i]);
    return SUCCESS;
}

int cudaGraphDestroy(void *graph) { return graph ? SUCCESS : fakeFailed(INVALID_VALUE); }
int cudaGraphExecDestroy(void *executable) { return executable ? SUCCESS : fakeFailed(INVALID_VALUE); }

/* Streams whose copies are made late, and these copies. */

static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;
static void *late_streams[64];
static size_t late_count = 0;
static struct Late {
    void *stream;
    Operation operation;
    struct Late *next;
} *late_first = NULL, **late_end = &late_first;

static int is_late(const void *stream) {
    for (size_t i = 0; i < late_count; i++)
        if (late_streams[i] == stream) return 1;
    return 0;
}

int fakeMakeLate(void *stream) {
    pthread_mutex_lock(&late_lock);
    int fits = late_count < sizeof late_streams / sizeof *late_streams;
    if (fits) late_streams[late_count++] = stream;
    pthread_mutex_unlock(&late_lock);
    return fits ? SUCCESS : fakeFailed(OUT_OF_MEMORY);
}

/* Keeps a copy for later where its stream is late. */
static int postpone(void *stream, Operation operation) {
    pthread_mutex_lock(&late_lock);
    int late = is_late(stream);
    if (late) {
        struct Late *made = malloc(sizeof(struct Late));
        *made = (struct Late){stream, operation, NULL};
        *late_end = made;
        late_end = &made->next;
    }
    pthread_mutex_unlock(&late_lock);
    return late;
}

/* Makes the copies of a stream that were put off, in their order, or drops them; of all streams where none is named. */
static void catch_up(const void *stream, int made) {
    pthread_mutex_lock(&late_lock);
    struct Late **place = &late_first;
    while (*place) {
        struct Late *each = *place;
        if (stream && each->stream != stream) {
            place = &each->next;
            continue;
        }
        if (made) perform(each->operation);
        *place = each->next;
        free(each);
    }
    late_end = place;
    pthread_mutex_unlock(&late_lock);
}

void fakeEndLate(void *stream) {
    catch_up(stream, 0); /* what nobody has waited for: its memory may be gone */
    pthread_mutex_lock(&late_lock);
    for (size_t i = 0; i < late_count; i++)
        if (late_streams[i] == stream) late_streams[i] = late_streams[--late_count];
    pthread_mutex_unlock(&late_lock);
}

int cudaStreamSynchronize(void *stream) {
    if (stream) catch_up(stream, 1); /* the legacy stream waits for none of them */
    return forbidden_wait("cudaStreamSynchronize", stream) ? fakeFailed(CAPTURE_UNSUPPORTED) : SUCCESS;
}

int cudaDeviceSynchronize(void) {
    catch_up(NULL, 1);
    return forbidden_wait("cudaDeviceSynchronize", captured_stream) ? fakeFailed(CAPTURE_UNSUPPORTED) : SUCCESS;
}

/* Copies and fills. */

static const char *side(int device) { return device < 0 ? "host" : "device"; }

static int is_right_way(const char *call, const void *to, const void *from, size_t size, int kind) {
    if (kind == EITHER_WAY || !size) return 1;
    int target = fakeDeviceOf(to), source = fakeDeviceOf(from);
    int to_device = kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE;
    int from_device = kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE;
    if ((target >= 0) == to_device && (source >= 0) == from_device) return 1;
    fprintf(stderr, "fake cuda: %s of %zu bytes, kind %d, to %s from %s memory\n", call, size, kind, side(target),
            side(source));
    return 0;
}

static int copy(const char *call, void *to, const void *from, size_t size, int kind, void *stream) {
    if (!is_right_way(call, to, from, size, kind)) return fakeFailed(INVALID_VALUE);
    int later = captured && stream == captured_stream;
    TRACE("%s %zu kind %d%s\n", call, size, kind, later ? " captured" : "");
    if (!later && stream && postpone(stream, (Operation){to, from, 0, size})) return SUCCESS;
    return (later ? record : perform)((Operation){to, from, 0, size});
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    if (fakeForbidden("cudaMemcpy")) return fakeFailed(CAPTURE_UNSUPPORTED);
    return copy("cudaMemcpy", to, from, size, kind, NULL);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return copy("cudaMemcpyAsync", to, from, size, kind, stream);
}

int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height,
                      int kind, void *stream) {
    int error = SUCCESS;
    for (size_t row = 0; row < height && !error; row++)
        error = copy("cudaMemcpy2DAsync", to + row * to_pitch, from + row * from_pitch, width, kind, stream);
    return error;
}

/* Symbols of device code have no memory here: they read as zeros. */
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
    (void)symbol;
    (void)offset;
    (void)kind;
    memset(to, 0, size);
    return SUCCESS;
}

static int fill(void *to, int value, size_t size, void *stream) {
    if (size && fakeDeviceOf(to) < 0) {
        fprintf(stderr, "fake cuda: cudaMemset of %zu bytes of host memory\n", size);
        return fakeFailed(INVALID_VALUE);
    }
    int later = captured && stream == captured_stream;
    return (later ? record : perform)((Operation){to, NULL, value, size});
}

int cudaMemset(void *to, int value, size_t size) {
    if (fakeForbidden("cudaMemset")) return fakeFailed(CAPTURE_UNSUPPORTED);
    return fill(to, value, size, NULL);
}

int cudaMemsetAsync(void *to, int value, size_t size, void *stream) { return fill(to, value, size, stream); }


/* libcublas and libcublasLt: handles, and answers that a caller reads. Products do nothing (they are generated stubs),
 * and want no workspace.
 */
#include "fake.h"

#include <string.h>

const char *cublasGetStatusString(int status) { return status ? "an error of the stand-in's" : "success"; }
const char *cublasGetStatusName(int status) { return status ? "CUBLAS_STATUS_UNKNOWN" : "CUBLAS_STATUS_SUCCESS"; }

int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return SUCCESS;
}

/* One algorithm is found: an opaque one without workspace. A result is 96 bytes. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, void *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = asked > 0;
    if (asked > 0) memset(results, 0, 96);
    return SUCCESS;
}

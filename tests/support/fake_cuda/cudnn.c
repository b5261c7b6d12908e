/* libcudnn: sizes a caller allocates by, and descriptors that say nothing. What computes is a generated stub.
 *
 * Does: one plan for each operation, with FAKE_CUDNN_WORKSPACE bytes of workspace.
 * Does not: look into a graph, so it refuses none; recurrent weights are one element each.
 */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15 };                 /* of an attribute's value */
enum { FIRST_PLAN_ATTRIBUTE = 400, LAST_PLAN_ATTRIBUTE = 403 }; /* an execution plan's, the workspace among them */

static size_t workspace(void) {
    const char *text = getenv("FAKE_CUDNN_WORKSPACE");
    return text ? strtoull(text, NULL, 10) : (size_t)1 << 20;
}

size_t cudnnGetVersion(void) { return 91300; }
const char *cudnnGetErrorString(int error) { return error ? "an error of the stand-in's" : "success"; }

void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) text[0] = 0;
}

int cudnnGetReductionWorkspaceSize(void *handle, void *reduction, void *a, void *c, size_t *size) {
    (void)handle, (void)reduction, (void)a, (void)c;
    *size = 1024;
    return SUCCESS;
}

int cudnnGetReductionIndicesSize(void *handle, void *reduction, void *a, void *c, size_t *size) {
    (void)handle, (void)reduction, (void)a, (void)c;
    *size = 0;
    return SUCCESS;
}

int cudnnGetConvolutionForwardWorkspaceSize(void *handle, void *x, void *w, void *convolution, void *y, int algorithm,
                                            size_t *size) {
    (void)handle, (void)x, (void)w, (void)convolution, (void)y, (void)algorithm;
    *size = workspace();
    return SUCCESS;
}

int cudnnDropoutGetStatesSize(void *handle, size_t *size) {
    (void)handle;
    *size = 4096;
    return SUCCESS;
}

int cudnnGetRNNTempSpaceSizes(void *handle, void *rnn, int mode, void *x, size_t *size, size_t *reserve) {
    (void)handle, (void)rnn, (void)mode, (void)x;
    *size = workspace();
    *reserve = 0;
    return SUCCESS;
}

int cudnnGetRNNWeightSpaceSize(void *handle, void *rnn, size_t *size) {
    (void)handle, (void)rnn;
    *size = 4096;
    return SUCCESS;
}

int cudnnGetRNNWeightParams(void *handle, void *rnn, int layer, size_t size, const void *space, int gate, void *matrix,
                            const void **matrix_start, void *bias, const void **bias_start) {
    (void)handle, (void)rnn, (void)layer, (void)size, (void)gate, (void)matrix, (void)bias;
    *matrix_start = *bias_start = space;
    return SUCCESS;
}

/* Every tensor is one single-precision number, seen in three dimensions. */
int cudnnGetTensorNdDescriptor(void *tensor, int asked, int *type, int *rank, int dims[], int strides[]) {
    (void)tensor;
    *type = 0;
    *rank = 3;
    for (int i = 0; i < asked; i++) dims[i] = strides[i] = 1;
    return SUCCESS;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    *descriptor = calloc(1, 256);
    *(int *)*descriptor = type;
    return SUCCESS;
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return SUCCESS;
}

/* Every attribute has one element: a plan's numbers are the workspace, all else is zero, or the caller's own. */
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *count, void *value) {
    (void)descriptor;
    if (count) *count = 1;
    if (!value || asked <= 0 || type == TYPE_DESCRIPTOR) return SUCCESS;
    if (type == TYPE_INT64) {
        int of_plan = name >= FIRST_PLAN_ATTRIBUTE && name <= LAST_PLAN_ATTRIBUTE;
        *(int64_t *)value = of_plan ? (int64_t)workspace() : 0;
    } else {
        *(int *)value = 0;
    }
    return SUCCESS;
}

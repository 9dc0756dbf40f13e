// What torch_npu and vllm-ascend are told: one Ascend910B3, contexts, streams and events that exist and do nothing.
#include <stdint.h>
#include <stddef.h>

static int something;

int aclrtGetDeviceCount(uint32_t *count) {
    *count = 1;
    return 0;
}
int aclrtGetDevice(int32_t *device) {
    *device = 0;
    return 0;
}
const char *aclrtGetSocName(void) {
    return "Ascend910B3";
}
int aclrtCreateContext(void **context, int32_t device) {
    *context = &something;
    return 0;
}
int aclrtGetCurrentContext(void **context) {
    *context = &something;
    return 0;
}
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    *stream = &something;
    return 0;
}
int aclrtCreateEvent(void **event) {
    *event = &something;
    return 0;
}
int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    *event = &something;
    return 0;
}
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
    *event = &something;
    return 0;
}

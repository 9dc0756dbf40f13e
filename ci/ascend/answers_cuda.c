// What torch's CUDA half is told: there is no device (cudaErrorNoDevice).
int cudaGetDeviceCount(int *count) {
    *count = 0;
    return 100;
}
int cudaGetDevice(int *device) {
    *device = 0;
    return 100;
}
// c10d::get_gil_checker(): a reference that torch's Python half writes to while it loads.
void *_ZN4c10d15get_gil_checkerEv(void) {
    static void *slot[8];
    return slot;
}

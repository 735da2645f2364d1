// What PyCUDA links and the emulator does not model: each call says so and returns CUDA_ERROR_NOT_SUPPORTED.
// cuda.h is not included on purpose: the functions are declared without their arguments, which the calling
// convention allows, and under the versioned names that programs link.
#include <cstdio>

namespace {
int unsupported(const char *name) {
    fprintf(stderr, "emulator: %s is not modelled\n", name);
    return 801;  // CUDA_ERROR_NOT_SUPPORTED
}
}  // namespace

#define STUB(name) \
    extern "C" int name() { return unsupported(#name); }

// Arrays, textures and surfaces
STUB(cuArray3DCreate_v2)
STUB(cuArray3DGetDescriptor_v2)
STUB(cuArrayCreate_v2)
STUB(cuArrayDestroy)
STUB(cuArrayGetDescriptor_v2)
STUB(cuMemcpy3DPeer)
STUB(cuMemcpy3DPeerAsync)
STUB(cuMemcpyAtoA_v2)
STUB(cuMemcpyAtoD_v2)
STUB(cuMemcpyAtoH_v2)
STUB(cuMemcpyDtoA_v2)
STUB(cuMemcpyHtoA_v2)
STUB(cuModuleGetSurfRef)
STUB(cuModuleGetTexRef)
STUB(cuParamSetTexRef)
STUB(cuSurfRefGetArray)
STUB(cuSurfRefSetArray)
STUB(cuTexRefCreate)
STUB(cuTexRefDestroy)
STUB(cuTexRefGetAddressMode)
STUB(cuTexRefGetAddress_v2)
STUB(cuTexRefGetArray)
STUB(cuTexRefGetFilterMode)
STUB(cuTexRefGetFlags)
STUB(cuTexRefGetFormat)
STUB(cuTexRefSetAddress2D_v3)
STUB(cuTexRefSetAddressMode)
STUB(cuTexRefSetAddress_v2)
STUB(cuTexRefSetArray)
STUB(cuTexRefSetFilterMode)
STUB(cuTexRefSetFlags)
STUB(cuTexRefSetFormat)

// Memory and events of other processes
STUB(cuIpcCloseMemHandle)
STUB(cuIpcGetEventHandle)
STUB(cuIpcGetMemHandle)
STUB(cuIpcOpenEventHandle)
STUB(cuIpcOpenMemHandle_v2)

// The linker of PTX and cubins
STUB(cuLinkAddData_v2)
STUB(cuLinkAddFile_v2)
STUB(cuLinkComplete)
STUB(cuLinkDestroy)

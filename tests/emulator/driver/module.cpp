// Modules: a shared object made by the nvcc stand-in, opened from memory.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "driver.hpp"

namespace emu {

namespace {
Module *loading = nullptr;  // what registers itself belongs to this one
std::vector<Module *> modules;

constexpr size_t static_shared_limit = 48 * 1024;

// The largest end of any part of the file: cuModuleLoadData is not told a length.
size_t image_bytes(const char *image) {
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    return header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
}

int find_segments(dl_phdr_info *info, size_t, void *data) {
    auto *module = static_cast<Module *>(data);
    auto *map = static_cast<link_map *>(module->handle);
    if (info->dlpi_addr != map->l_addr) return 0;
    uintptr_t low = ~uintptr_t{0}, high = 0, data_low = ~uintptr_t{0}, data_high = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto &part = info->dlpi_phdr[i];
        if (part.p_type != PT_LOAD) continue;
        uintptr_t start = info->dlpi_addr + part.p_vaddr, end = start + part.p_memsz;
        low = std::min(low, start);
        high = std::max(high, end);
        if (part.p_flags & PF_W) {
            data_low = std::min(data_low, start);
            data_high = std::max(data_high, end);
        }
    }
    module->code_low = low;
    module->code_high = high;
    if (data_high > data_low)
        module->data = adopt(Kind::module_data, reinterpret_cast<void *>(data_low), data_high - data_low,
                             module->context, module->context ? module->context->device : 0);
    return 1;
}
}  // namespace

// Where the __constant__ variables lie.
void find_constants(Module &module, const char *image) {
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    auto section = [&](unsigned i) {
        Elf64_Shdr result;
        memcpy(&result, image + header.e_shoff + size_t{i} * header.e_shentsize, sizeof result);
        return result;
    };
    const char *names = image + section(header.e_shstrndx).sh_offset;
    for (unsigned i = 0; i < header.e_shnum; ++i) {
        Elf64_Shdr part = section(i);
        if (strcmp(names + part.sh_name, ".emu.constant") != 0) continue;
        module.constant_low = static_cast<link_map *>(module.handle)->l_addr + part.sh_addr;
        module.constant_high = module.constant_low + part.sh_size;
    }
}

CUresult load_module(Module *&result, const void *image, size_t bytes, DeviceContext *context) {
    if (!image) return CUDA_ERROR_INVALID_VALUE;
    auto *elf = static_cast<const char *>(image);
    if (memcmp(elf, ELFMAG, SELFMAG) != 0) {
        say("cuModuleLoadData: not an image of the emulator's nvcc (PTX and fat binaries are not modelled)");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    Elf64_Ehdr header;
    memcpy(&header, elf, sizeof header);
    if (header.e_machine == 190) {  // EM_CUDA
        say("cuModuleLoadData: a cubin for a real GPU; compile with the emulator's nvcc");
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    // Minor versions are compatible, a newer major version is not.
    if (options().version / 1000 < CUDA_VERSION / 1000) return CUDA_ERROR_INVALID_IMAGE;
    if (!bytes) bytes = image_bytes(elf);
    auto module = std::make_unique<Module>();
    module->context = context;
    module->file = memfd_create("emulator-module", MFD_CLOEXEC);
    for (size_t done = 0; done < bytes;) {
        ssize_t n = write(module->file, elf + done, bytes - done);
        if (n <= 0) {
            close(module->file);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        done += static_cast<size_t>(n);
    }
    std::string path = text("/proc/self/fd/%d", module->file);
    loading = module.get();
    module->handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    loading = nullptr;
    if (!module->handle) {
        say("cuModuleLoadData: %s", dlerror());
        close(module->file);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    module->checked = dlsym(module->handle, "emu_checked_build") != nullptr;
    // A cubin runs on its own major version from its minor version on; one for "sm_90a" on 9.0 alone.
    auto *made_for = static_cast<const char *>(dlsym(module->handle, "emu_architecture"));
    int architecture = made_for ? atoi(made_for) : 0, capability = options().capability;
    bool exact = made_for && strchr(made_for, 'a');
    if (context->device >= 0 && made_for &&
        (exact ? architecture != capability : architecture / 10 != capability / 10 || architecture > capability)) {
        say("cuModuleLoadData: a cubin for sm_%s, on a device of compute capability %d.%d", made_for, capability / 10,
            capability % 10);
        dlclose(module->handle);
        close(module->file);
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    // Places of the static shared variables, aligned as declared and no better, so that what needs more shows; checked
    // runs leave a gap after each.
    unsigned offset = 0;
    for (EmuSharedSlot *slot : module->slots) {
        offset = (offset + slot->align - 1) / slot->align * slot->align;
        if (offset % (2 * slot->align) == 0) offset += slot->align;
        slot->offset = offset;
        offset += slot->size + (options().checked() ? 32 : 0);
    }
    module->static_bytes = offset;
    for (auto &[name, function] : module->functions) {
        unsigned total = 0;
        for (EmuSharedSlot *slot : module->slots)
            for (uint32_t i = 0; i < function->info.shared_count; ++i)
                if (function->info.shared_ids[i] == slot->id) {
                    total = (total + slot->align - 1) / slot->align * slot->align + slot->size;
                    break;
                }
        function->static_shared = total;
        function->max_dynamic_shared = static_cast<int>(static_shared_limit - std::min<size_t>(total, 48 * 1024));
    }
    dl_iterate_phdr(find_segments, module.get());
    find_constants(*module, elf);
    modules.push_back(module.get());
    result = module.release();
    return CUDA_SUCCESS;
}

void unload_module(Module *module) {
    modules.erase(std::find(modules.begin(), modules.end(), module));
    if (module->data) release(module->data);
    dlclose(module->handle);
    close(module->file);
    delete module;
}

Module *module_of_code(const void *pc) {
    auto address = reinterpret_cast<uintptr_t>(pc);
    for (Module *module : modules)
        if (address >= module->code_low && address < module->code_high) return module;
    return nullptr;
}

Module *module_of_data(uintptr_t address) { return module_of_code(reinterpret_cast<void *>(address)); }

}  // namespace emu

using namespace emu;

extern "C" {

void emu_register_kernel(const EmuKernelInfo *info) {
    if (!loading) return;
    auto function = std::make_unique<Function>();
    function->module = loading;
    function->info = *info;
    Dl_info symbol{};
    function->symbol = dladdr(info->function, &symbol) && symbol.dli_sname ? symbol.dli_sname : info->name;
    std::string name = function->symbol;
    loading->functions[name] = std::move(function);
}

void emu_register_slot(EmuSharedSlot *slot) {
    if (loading) loading->slots.push_back(slot);
}

// For the nvcc stand-in: opens a module and says what ptxas would refuse. Returns the number of complaints.
int emu_inspect_module(const char *path, int print_usage) {
    FILE *file = fopen(path, "rb");
    if (!file) return 1;
    std::string image;
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) image.append(buffer, n);
    fclose(file);
    DeviceContext none;
    none.device = -1;  // of any architecture
    Module *module = nullptr;
    if (load_module(module, image.data(), image.size(), &none) != CUDA_SUCCESS) return 1;
    int complaints = 0;
    for (auto &[name, function] : module->functions) {
        if (function->static_shared > static_shared_limit) {
            fprintf(stderr, "ptxas error   : Entry function '%s' uses too much shared data (0x%x bytes, 0x%zx max)\n",
                    name.c_str(), function->static_shared, static_shared_limit);
            ++complaints;
        }
        if (function->info.argument_bytes > 32764) {
            fprintf(stderr, "ptxas error   : Entry function '%s': parameters take %u bytes, 32764 max\n", name.c_str(),
                    function->info.argument_bytes);
            ++complaints;
        }
        if (print_usage)
            fprintf(stderr, "ptxas info    : '%s': %u bytes smem, %u bytes of parameters (emulated: no registers)\n",
                    name.c_str(), function->static_shared, function->info.argument_bytes);
    }
    if (module->constant_high - module->constant_low > 65536) {
        fprintf(stderr, "ptxas error   : File uses too much global constant data (0x%zx bytes, 0x10000 max)\n",
                static_cast<size_t>(module->constant_high - module->constant_low));
        ++complaints;
    }
    unload_module(module);
    return complaints;
}

}  // extern "C"

// What the stand-in for nvcc puts in the place of inline assembly: ldmatrix, mma.sync and cp.async (wgmma and mbarriers:
// warpgroups.cpp).
//
// Which lane has which element is the PTX ISA's ("Matrix fragments"). Products are exact in double; what becomes of their
// sums is said at `add_products`.
#include <cfenv>
#include <cmath>
#include <cstring>

#include "driver.hpp"

using namespace emu;

namespace {
constexpr unsigned all_lanes = ~0u;

struct Rows {
    const uint16_t *row;
    unsigned *registers;
    unsigned count;
    int transposed;
};

void spread(void **lanes, unsigned) {
    auto of = [&](unsigned lane) -> Rows & { return *static_cast<Rows *>(lanes[lane]); };
    for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned matrix = 0; matrix < of(lane).count; ++matrix) {
            unsigned first = lane % 4 * 2, found[2];
            for (unsigned i = 0; i < 2; ++i) {
                unsigned row = of(lane).transposed ? first + i : lane / 4, column = of(lane).transposed ? lane / 4 : first + i;
                found[i] = of(matrix * 8 + row).row[column];
            }
            of(lane).registers[matrix] = found[0] | found[1] << 16;
        }
}

struct Factors {
    float *sums;
    const unsigned *a, *b;
    EmuFactor type;
};

void multiply(void **lanes, unsigned) {
    auto of = [&](unsigned lane) -> Factors & { return *static_cast<Factors *>(lanes[lane]); };
    EmuFactor type = of(0).type;
    const unsigned terms = type == EMU_TF32 ? 8 : 16;
    double a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; ++lane) {
        unsigned group = lane / 4, member = lane % 4;
        auto place = [&](unsigned half, unsigned one) {  // along k
            return type == EMU_TF32 ? member + half * 4 : member * 2 + half * 8 + one;
        };
        auto value = [&](unsigned word, unsigned one) -> double {
            if (type == EMU_TF32) return of_bits(word & 0xffffe000u);
            uint32_t bits = one ? word >> 16 : word & 0xffffu;
            return type == EMU_BF16 ? of_bits(bits << 16) : of_half(bits);
        };
        for (unsigned one = 0; one < (type == EMU_TF32 ? 1u : 2u); ++one) {
            for (unsigned i = 0; i < 4; ++i) a[group + i % 2 * 8][place(i / 2, one)] = value(of(lane).a[i], one);
            for (unsigned i = 0; i < 2; ++i) b[place(i, one)][group] = value(of(lane).b[i], one);
        }
    }
    double sums[16][8];
    auto each = [&](auto with) {
        for (unsigned lane = 0; lane < 32; ++lane)
            for (unsigned i = 0; i < 4; ++i) with(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2], of(lane).sums[i]);
    };
    each([](double &sum, float &own) { sum = own; });
    for (unsigned row = 0; row < 16; ++row) add_products(sums[row], a[row], b[0], 8, terms, type);
    each([](double &sum, float &own) { own = static_cast<float>(sum); });
}

// `terms` at once, in the rounding mode that cuts off.
__attribute__((noinline, optimize("O3"))) void add_cut_off(double *sums, const double *a, const double *b, unsigned columns,
                                                           unsigned terms) {
    constexpr unsigned width = 8;
    auto cut = [](double x, double unit) { return std::copysign(std::fabs(x) + unit - unit, x); };
    for (unsigned first = 0; first < columns; first += width) {
        double greatest[width], unit[width], total[width], *sum = sums + first;
        for (unsigned n = 0; n < width; ++n) greatest[n] = std::fabs(sum[n]);
        for (unsigned k = 0; k < terms; ++k)
            for (unsigned n = 0; n < width; ++n) {
                double size = std::fabs(a[k] * b[k * columns + first + n]);
                greatest[n] = size > greatest[n] ? size : greatest[n];
            }
        // A number of which a double has just the bits that are kept of the greatest, which are 52 more than a place.
        for (unsigned n = 0; n < width; ++n) {
            uint64_t bits;
            memcpy(&bits, &greatest[n], sizeof bits);
            bits &= 0x7ff0000000000000ull;
            memcpy(&unit[n], &bits, sizeof bits);
            unit[n] *= 0x1p28;
            total[n] = cut(sum[n], unit[n]);
        }
        for (unsigned k = 0; k < terms; ++k)
            for (unsigned n = 0; n < width; ++n) total[n] += cut(a[k] * b[k * columns + first + n], unit[n]);
        for (unsigned n = 0; n < width; ++n) {
            if (!std::isfinite(total[n])) {
                total[n] = sum[n];
                for (unsigned k = 0; k < terms; ++k) total[n] += a[k] * b[k * columns + first + n];
            }
            sum[n] = std::fabs(total[n]) < 0x1p128 ? static_cast<float>(total[n]) : total[n] * HUGE_VAL;
        }
    }
}
}  // namespace

namespace emu {

// Instructions get 32 bits of an address in shared memory: its distance from the block's (device.h).
char *in_shared(unsigned address) { return emu_self->shared_static + static_cast<int32_t>(address); }

std::string place_in_source(EmuSite site) {
    auto &fiber = *static_cast<Fiber *>(emu_self);
    return text("in kernel %s, %s, at %s:%d", kernel_name().c_str(), thread_text(fiber).c_str(), site.file, site.line);
}

void check_place(const void *place, unsigned bytes, bool shared, const char *what, EmuSite site) {
    if (reinterpret_cast<uintptr_t>(place) % bytes)
        fail_launch(CUDA_ERROR_MISALIGNED_ADDRESS, text("misaligned address: %s at %p, which is not a multiple of %u, %s",
                                                        what, place, bytes, place_in_source(site).c_str()));
    if (shared && !(emu_is_shared(place) && emu_is_shared(static_cast<const char *>(place) + bytes - 1)))
        fail_launch(CUDA_ERROR_ILLEGAL_ADDRESS, text("out of bounds: %s at %p, which is not in shared memory, %s", what,
                                                     place, place_in_source(site).c_str()));
}

// Tensor cores add eight products of halves, or four of TF32, to a sum at once. What lies more than 24 binary places below
// the greatest of them is cut off of each, and of the result what a float does not hold: nothing is rounded to nearest. So
// do the A100's; the H100's add twice as many at once and keep a place more (Khattak and Mikaitis, "Accurate Models of
// NVIDIA Tensor Cores", arXiv 2512.07004; Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021).
void add_products(double *sums, const double *a, const double *b, unsigned columns, unsigned terms, EmuFactor type) {
    const unsigned at_once = type == EMU_TF32 ? 4 : 8;
    const int mode = fegetround();
    fesetround(FE_TOWARDZERO);
    for (unsigned k = 0; k < terms; k += at_once) add_cut_off(sums, a + k, b + k * columns, columns, at_once);
    fesetround(mode);
}

float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float of_half(uint32_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size >= 0x7c00u) return of_bits(sign | 0x7f800000u | (size & 0x3ffu) << 13);
    if (size >= 0x400u) return of_bits(sign | ((size << 13) + 0x38000000u));
    return (sign ? -1.0f : 1.0f) * static_cast<float>(size) * 0x1p-24f;
}

}  // namespace emu

extern "C" {

void emu_ldmatrix(unsigned *registers, unsigned count, int transposed, unsigned address, EmuSite site) {
    const char *row = in_shared(address);
    if (emu_self->lane < 8 * count) {  // the others' addresses are not looked at
        check_place(row, 16, true, "a row of ldmatrix", site);
        if (options().checked()) check_access(row, 16, EMU_READ, __builtin_return_address(0));
    }
    Rows mine{reinterpret_cast<const uint16_t *>(row), registers, count, transposed};
    emu_warp_collective(all_lanes, &mine, spread, "ldmatrix", site);
}

void emu_mma(float *sums, const unsigned *a, const unsigned *b, EmuFactor type, EmuSite site) {
    Factors mine{sums, a, b, type};
    emu_warp_collective(all_lanes, &mine, multiply, "mma.sync", site);
}

void emu_cp_async(unsigned shared, const void *global, unsigned bytes, unsigned size, EmuSite site) {
    char *to = in_shared(shared);
    check_place(to, bytes, true, "cp.async to", site);
    check_place(global, bytes, false, "cp.async from", site);
    if (size > bytes)
        fail_launch(CUDA_ERROR_LAUNCH_FAILED,
                    text("cp.async of %u bytes takes %u from its source, %s", bytes, size, place_in_source(site).c_str()));
    begin_async_copy(to, global, bytes, bytes - size, __builtin_return_address(0));
}

}  // extern "C"

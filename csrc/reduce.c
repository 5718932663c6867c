/* Reductions and copies: the loops of kernels.h for each instruction set, and the choice of one at run time. */
#include "internal.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { BLOCK = 512 };

typedef void kernel(void *first, void *second, const void *const *sources, int ranks, size_t count, double argument);

typedef struct {
    const char *name;
    void (*copy)(void *to, const void *from, uint64_t bytes);
    void (*stream)(void *to, const void *from, uint64_t bytes);
    kernel *kernels[PHX_DTYPES][PHX_REDUCES];
} instruction_set;

/* Holds the sum of as many 64-bit numbers as there can be ranks, on every machine with 64-bit registers. */
#if defined(__SIZEOF_INT128__)
typedef __int128 widest;
#else
typedef int64_t widest;
#endif

/* ---- two numbers into one; the casts undo the promotion of small integers */

#define ADD(TYPE, x, y) ((TYPE)((x) + (y)))
#define MULTIPLY(TYPE, x, y) ((TYPE)(_Generic((TYPE)0, float: 1.0f, double: 1.0, default: 1u) * (x) * (y)))
#define AND(TYPE, x, y) ((TYPE)((x) & (y)))
#define OR(TYPE, x, y) ((TYPE)((x) | (y)))
#define XOR(TYPE, x, y) ((TYPE)((x) ^ (y)))
/* x != x is a NaN, which must not be lost. */
#define LEAST(TYPE, x, y) ((x) != (x) || (x) < (y) ? (x) : (y))
#define GREATEST(TYPE, x, y) ((x) != (x) || (x) > (y) ? (x) : (y))

/* ---- half-precision floats, by their bits and without branches, so that compilers can vectorise them */

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float f32_of_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t bf16_of_f32(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t quiet_nan = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : nearest_even);
}

static inline float f32_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t rest = (uint32_t)(h & 0x7fff) << 13;
    /* Exponent and mantissa lie where float32 has them, with a bias that is 112 too small: a multiplication by 2^112
     * puts that right, for subnormal numbers as well. Infinities and NaN need the highest exponent. */
    float value = float_of(rest) * 0x1p112f;
    uint32_t bits = bits_of(value) | (rest >= 0x0f800000 ? 0x7f800000 : 0);
    return float_of(sign | bits);
}

static inline uint16_t f16_of_f32(float x)
{
    uint32_t sign = (bits_of(x) >> 16) & 0x8000;
    uint32_t bits = bits_of(x) & 0x7fffffff;
    /* Normal results: round to nearest even in the 13 bits that go, then move the bias. */
    uint32_t normal = (bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13;
    /* Subnormal ones: adding 0.5 makes the hardware round at the right place. */
    uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - 0x3f000000;
    uint32_t result = bits < 0x38800000 ? subnormal : normal;
    result = bits >= 0x477ff000 ? 0x7c00 : result; /* from 65520 on it rounds to infinity */
    result = bits > 0x7f800000 ? (0x7e00 | ((bits >> 13) & 0x3ff)) : result;
    return (uint16_t)(sign | result);
}

/* ---- the instruction sets */

typedef long long vector16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef long long vector32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef long long vector64 __attribute__((vector_size(64), aligned(1), may_alias));

#define LEVEL(name) name##_baseline
#if defined(__aarch64__)
#define LEVEL_NAME "neon"
#else
#define LEVEL_NAME "baseline"
#endif
#define TARGET
#define VECTOR vector16
#if defined(__x86_64__)
#define STREAM(to, vector) _mm_stream_si128((__m128i *)(to), (__m128i)(vector))
#endif
#include "kernels.h"

#if defined(__x86_64__)

#define LEVEL(name) name##_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,f16c")))
#define VECTOR vector32
#define STREAM(to, vector) _mm256_stream_si256((__m256i *)(to), (__m256i)(vector))
#define HAS_F16C
#include "kernels.h"

#define LEVEL(name) name##_avx512
#define LEVEL_NAME "avx512"
/* Compilers use half of these registers unless an option, which each has its own, tells them not to. */
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"
#if defined(__clang__)
#define TARGET __attribute__((target(AVX512), min_vector_width(512)))
#else
#define TARGET __attribute__((target(AVX512 ",prefer-vector-width=512")))
#endif
#define VECTOR vector64
#define STREAM(to, vector) _mm512_stream_si512((__m512i *)(to), (__m512i)(vector))
#define HAS_F16C
#include "kernels.h"

static const instruction_set *best_set(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &set_avx512;
    /* Every processor with AVX2 has F16C. */
    return __builtin_cpu_supports("avx2") ? &set_avx2 : &set_baseline;
}

#else

static const instruction_set *best_set(void) { return &set_baseline; }

#endif

/* Chosen when the library is loaded, before there can be a second thread. */
static const instruction_set *chosen = &set_baseline;

__attribute__((constructor)) static void choose(void) { chosen = best_set(); }

const char *phx_instructions(void) { return chosen->name; }

int phx_use_instructions(const char *name)
{
    const instruction_set *sets[] = {&set_baseline,
#if defined(__x86_64__)
                                     &set_avx2, &set_avx512
#endif
    };
    const instruction_set *best = best_set();
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (strcmp(sets[i]->name, name) == 0) {
            chosen = sets[i];
            return 0;
        } else if (sets[i] == best)
            break; /* this processor has none of the later ones */
    return -1;
}

int phx_can_reduce(uint32_t dtype, uint32_t reduce)
{
    return dtype < PHX_DTYPES && reduce < PHX_REDUCES && chosen->kernels[dtype][reduce] != NULL;
}

void copy_bytes(void *to, const void *from, uint64_t bytes) { chosen->copy(to, from, bytes); }

void stream_bytes(void *to, const void *from, uint64_t bytes) { chosen->stream(to, from, bytes); }

void reduce_blocks(const phx_call *call, void *first, void *second, const void *const *sources, int ranks,
                   uint64_t bytes)
{
    double argument = call->reduce == PHX_PREMUL_SUM ? call->factor : ranks;
    chosen->kernels[call->dtype][call->reduce](first, second, sources, ranks, bytes / call->width, argument);
}

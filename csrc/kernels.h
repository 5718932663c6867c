/* The loops over payload, included by reduce.c once for each instruction set.
 *
 * LEVEL(name) gives a name its suffix, TARGET is the attribute that lets the compiler use the instructions. The loops
 * are written so that compilers turn them into vector code; only float16 needs help, where the hardware converts.
 *
 * Sources are combined in rank order, in blocks that stay in the first-level cache, and a block is read whole before
 * it is written: so every rank gets the same bits, and a result may overwrite one of its sources. */

/* A vector loop, not memcpy: the lines have just been written by another core, and memcpy of such lines was measured
 * to fall to a fraction of its speed. The barrier keeps compilers from making a memcpy of the loop. */
TARGET static void LEVEL(copy)(void *to, const void *from, uint64_t bytes)
{
    char *t = to;
    const char *f = from;
    for (; bytes >= 4 * sizeof(VECTOR); bytes -= 4 * sizeof(VECTOR)) {
        VECTOR a = ((const VECTOR *)f)[0], b = ((const VECTOR *)f)[1];
        VECTOR c = ((const VECTOR *)f)[2], d = ((const VECTOR *)f)[3];
        ((VECTOR *)t)[0] = a, ((VECTOR *)t)[1] = b;
        ((VECTOR *)t)[2] = c, ((VECTOR *)t)[3] = d;
        t += 4 * sizeof(VECTOR);
        f += 4 * sizeof(VECTOR);
        __asm__ volatile("" ::: "memory");
    }
    memcpy(t, f, bytes);
}

/* The same for targets too large to stay in a cache: it writes past the caches, so that a line need not be read before it
 * is written, and what the slots hold is not pushed out. */
TARGET static void LEVEL(stream)(void *to, const void *from, uint64_t bytes)
{
#ifdef STREAM
    char *t = to;
    const char *f = from;
    uint64_t head = smaller(bytes, -(uintptr_t)t % sizeof(VECTOR)); /* such stores need aligned addresses */
    LEVEL(copy)(t, f, head);
    uint64_t step = 4 * sizeof(VECTOR), whole = (bytes - head) / step * step;
    for (uint64_t i = head; i < head + whole; i += step) {
        const VECTOR *v = (const VECTOR *)(f + i);
        VECTOR a = v[0], b = v[1], c = v[2], d = v[3];
        STREAM(t + i, a), STREAM(t + i + sizeof(VECTOR), b);
        STREAM(t + i + 2 * sizeof(VECTOR), c), STREAM(t + i + 3 * sizeof(VECTOR), d);
    }
    LEVEL(copy)(t + head + whole, f + head + whole, bytes - head - whole);
    _mm_sfence(); /* such stores are ordered by nothing else; another thread will read them */
#else
    LEVEL(copy)(to, from, bytes);
#endif
}

/* ---- from what is stored to what is computed with, and back */

TARGET static const float *LEVEL(load_f16)(const void *source, float *to, size_t n)
{
    const uint16_t *from = source;
    size_t i = 0;
#ifdef HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++)
        to[i] = f32_of_f16(from[i]);
    return to;
}

TARGET static void LEVEL(store_f16)(void *target, const float *from, size_t n)
{
    uint16_t *to = target;
    size_t i = 0;
#ifdef HAS_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        to[i] = f16_of_f32(from[i]);
}

TARGET static const float *LEVEL(load_bf16)(const void *source, float *to, size_t n)
{
    const uint16_t *from = source;
    for (size_t i = 0; i < n; i++)
        to[i] = f32_of_bf16(from[i]);
    return to;
}

TARGET static void LEVEL(store_bf16)(void *target, const float *from, size_t n)
{
    uint16_t *to = target;
    for (size_t i = 0; i < n; i++)
        to[i] = bf16_of_f32(from[i]);
}

#define LOAD_PLAIN(source, buffer, n) ((void)(buffer), (const void *)(source))
#define STORE_PLAIN(target, from, n) LEVEL(copy)(target, from, (n) * sizeof *(from))

/* ---- reductions: `argument` is the factor of a PREMUL_SUM, and the number of ranks otherwise */

#define KERNEL(NAME, STORED, TYPE, LOAD, STORE, PREPARE, COMBINE, FINISH)                                              \
    TARGET static void LEVEL(NAME)(void *first, void *second, const void *const *sources, int ranks, size_t count,     \
                                   double argument)                                                                    \
    {                                                                                                                  \
        TYPE left[BLOCK], right[BLOCK];                                                                                \
        for (size_t at = 0; at < count; at += BLOCK) {                                                                 \
            size_t n = count - at < BLOCK ? count - at : BLOCK;                                                        \
            const TYPE *x = LOAD((const STORED *)sources[0] + at, left, n);                                            \
            x = PREPARE(x, left, n, argument);                                                                         \
            for (int s = 1; s < ranks; s++) {                                                                          \
                const TYPE *y = LOAD((const STORED *)sources[s] + at, right, n);                                       \
                y = PREPARE(y, right, n, argument);                                                                    \
                for (size_t i = 0; i < n; i++)                                                                         \
                    left[i] = COMBINE(TYPE, x[i], y[i]);                                                               \
                x = left;                                                                                              \
            }                                                                                                          \
            x = FINISH(x, left, n, argument);                                                                          \
            STORE((STORED *)first + at, x, n);                                                                         \
            if (second)                                                                                                \
                STORE((STORED *)second + at, x, n);                                                                    \
        }                                                                                                              \
    }

#define NOTHING(x, buffer, n, argument) ((void)(argument), (x))

#define TIMES(TYPE, SUFFIX)                                                                                            \
    TARGET static const TYPE *LEVEL(times_##SUFFIX)(const TYPE *x, TYPE *to, size_t n, double factor)                  \
    {                                                                                                                  \
        for (size_t i = 0; i < n; i++)                                                                                 \
            to[i] = x[i] * (TYPE)factor;                                                                               \
        return to;                                                                                                     \
    }

#define OVER(TYPE, SUFFIX)                                                                                             \
    TARGET static const TYPE *LEVEL(over_##SUFFIX)(const TYPE *x, TYPE *to, size_t n, double ranks)                    \
    {                                                                                                                  \
        for (size_t i = 0; i < n; i++)                                                                                 \
            to[i] = (TYPE)(x[i] / (TYPE)ranks);                                                                        \
        return to;                                                                                                     \
    }

TIMES(float, f32)
TIMES(double, f64)
OVER(float, f32)
OVER(double, f64)
OVER(int32_t, i32)
OVER(int64_t, i64)
OVER(widest, widest)

#define FLOAT_KERNELS(NAME, STORED, TYPE, LOAD, STORE, COMPUTED)                                                       \
    KERNEL(sum_##NAME, STORED, TYPE, LOAD, STORE, NOTHING, ADD, NOTHING)                                               \
    KERNEL(avg_##NAME, STORED, TYPE, LOAD, STORE, NOTHING, ADD, LEVEL(over_##COMPUTED))                                \
    KERNEL(premul_##NAME, STORED, TYPE, LOAD, STORE, LEVEL(times_##COMPUTED), ADD, NOTHING)                            \
    KERNEL(product_##NAME, STORED, TYPE, LOAD, STORE, NOTHING, MULTIPLY, NOTHING)                                      \
    KERNEL(min_##NAME, STORED, TYPE, LOAD, STORE, NOTHING, LEAST, NOTHING)                                             \
    KERNEL(max_##NAME, STORED, TYPE, LOAD, STORE, NOTHING, GREATEST, NOTHING)

FLOAT_KERNELS(f32, float, float, LOAD_PLAIN, STORE_PLAIN, f32)
FLOAT_KERNELS(f64, double, double, LOAD_PLAIN, STORE_PLAIN, f64)
FLOAT_KERNELS(f16, uint16_t, float, LEVEL(load_f16), LEVEL(store_f16), f32)
FLOAT_KERNELS(bf16, uint16_t, float, LEVEL(load_bf16), LEVEL(store_bf16), f32)

#define PLAIN_KERNEL(NAME, TYPE, COMBINE, FINISH)                                                                      \
    KERNEL(NAME, TYPE, TYPE, LOAD_PLAIN, STORE_PLAIN, NOTHING, COMBINE, FINISH)

/* Sums and products of signed numbers have the bits of those of unsigned ones, and overflow there is defined. */
#define INTEGER_KERNELS(BITS)                                                                                          \
    PLAIN_KERNEL(sum_##BITS, uint##BITS##_t, ADD, NOTHING)                                                             \
    PLAIN_KERNEL(product_##BITS, uint##BITS##_t, MULTIPLY, NOTHING)                                                    \
    PLAIN_KERNEL(band_##BITS, uint##BITS##_t, AND, NOTHING)                                                            \
    PLAIN_KERNEL(bor_##BITS, uint##BITS##_t, OR, NOTHING)                                                              \
    PLAIN_KERNEL(bxor_##BITS, uint##BITS##_t, XOR, NOTHING)                                                            \
    PLAIN_KERNEL(min_i##BITS, int##BITS##_t, LEAST, NOTHING)                                                           \
    PLAIN_KERNEL(max_i##BITS, int##BITS##_t, GREATEST, NOTHING)                                                        \
    PLAIN_KERNEL(min_u##BITS, uint##BITS##_t, LEAST, NOTHING)                                                          \
    PLAIN_KERNEL(max_u##BITS, uint##BITS##_t, GREATEST, NOTHING)

INTEGER_KERNELS(8)
INTEGER_KERNELS(16)
INTEGER_KERNELS(32)
INTEGER_KERNELS(64)

/* An average lies between its numbers, but their sum need not: it is computed in a wider type. */
#define AVERAGE(NAME, STORED, TYPE, OVER_TYPE)                                                                         \
    TARGET static const TYPE *LEVEL(load_##NAME)(const void *source, TYPE *to, size_t n)                               \
    {                                                                                                                  \
        for (size_t i = 0; i < n; i++)                                                                                 \
            to[i] = ((const STORED *)source)[i];                                                                       \
        return to;                                                                                                     \
    }                                                                                                                  \
    TARGET static void LEVEL(store_##NAME)(void *target, const TYPE *from, size_t n)                                   \
    {                                                                                                                  \
        for (size_t i = 0; i < n; i++)                                                                                 \
            ((STORED *)target)[i] = (STORED)from[i];                                                                   \
    }                                                                                                                  \
    KERNEL(avg_##NAME, STORED, TYPE, LEVEL(load_##NAME), LEVEL(store_##NAME), NOTHING, ADD, LEVEL(over_##OVER_TYPE))

AVERAGE(i8, int8_t, int32_t, i32)
AVERAGE(u8, uint8_t, int32_t, i32)
AVERAGE(i16, int16_t, int32_t, i32)
AVERAGE(u16, uint16_t, int32_t, i32)
AVERAGE(i32, int32_t, int64_t, i64)
AVERAGE(u32, uint32_t, int64_t, i64)
AVERAGE(i64, int64_t, widest, widest)
AVERAGE(u64, uint64_t, widest, widest)

/* ---- the tables that reduce.c chooses from */

#define FLOAT_ROW(NAME)                                                                                                \
    {                                                                                                                  \
        [PHX_SUM] = LEVEL(sum_##NAME), [PHX_AVG] = LEVEL(avg_##NAME), [PHX_PRODUCT] = LEVEL(product_##NAME),           \
        [PHX_MIN] = LEVEL(min_##NAME), [PHX_MAX] = LEVEL(max_##NAME), [PHX_PREMUL_SUM] = LEVEL(premul_##NAME)          \
    }
#define INTEGER_ROW(SIGN, BITS)                                                                                        \
    {                                                                                                                  \
        [PHX_SUM] = LEVEL(sum_##BITS), [PHX_AVG] = LEVEL(avg_##SIGN##BITS), [PHX_PRODUCT] = LEVEL(product_##BITS),     \
        [PHX_MIN] = LEVEL(min_##SIGN##BITS), [PHX_MAX] = LEVEL(max_##SIGN##BITS), [PHX_BAND] = LEVEL(band_##BITS),     \
        [PHX_BOR] = LEVEL(bor_##BITS), [PHX_BXOR] = LEVEL(bxor_##BITS)                                                 \
    }
/* For bool a sum is "any" and a product is "all": a byte of 2 would be no bool. */
#define BOOL_ROW                                                                                                       \
    {                                                                                                                  \
        [PHX_SUM] = LEVEL(bor_8), [PHX_PRODUCT] = LEVEL(band_8), [PHX_MIN] = LEVEL(band_8), [PHX_MAX] = LEVEL(bor_8),  \
        [PHX_BAND] = LEVEL(band_8), [PHX_BOR] = LEVEL(bor_8), [PHX_BXOR] = LEVEL(bxor_8)                               \
    }

static const instruction_set LEVEL(set) = {
    .name = LEVEL_NAME,
    .copy = LEVEL(copy),
    .stream = LEVEL(stream),
    .kernels =
        {
            [PHX_F32] = FLOAT_ROW(f32),
            [PHX_F64] = FLOAT_ROW(f64),
            [PHX_F16] = FLOAT_ROW(f16),
            [PHX_BF16] = FLOAT_ROW(bf16),
            [PHX_I8] = INTEGER_ROW(i, 8),
            [PHX_I16] = INTEGER_ROW(i, 16),
            [PHX_I32] = INTEGER_ROW(i, 32),
            [PHX_I64] = INTEGER_ROW(i, 64),
            [PHX_U8] = INTEGER_ROW(u, 8),
            [PHX_U16] = INTEGER_ROW(u, 16),
            [PHX_U32] = INTEGER_ROW(u, 32),
            [PHX_U64] = INTEGER_ROW(u, 64),
            [PHX_BOOL] = BOOL_ROW,
        },
};

#undef LOAD_PLAIN
#undef STORE_PLAIN
#undef KERNEL
#undef NOTHING
#undef TIMES
#undef OVER
#undef FLOAT_KERNELS
#undef PLAIN_KERNEL
#undef INTEGER_KERNELS
#undef FLOAT_ROW
#undef AVERAGE
#undef INTEGER_ROW
#undef BOOL_ROW
#undef LEVEL
#undef LEVEL_NAME
#undef TARGET
#undef VECTOR
#undef STREAM
#undef HAS_F16C

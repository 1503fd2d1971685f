// Common ground of the self-checking guest programs: page contents that can be
// computed again from a few numbers, the model of a memory region, and the way
// a mismatch is reported.
//
// Every page of every region holds bytes that follow from (key, version,
// patches, cut). A program keeps only those four in its model and can tell at
// any time what each byte of the page must be, so a lost write, a resurrected
// old page, a swapped page and a flipped bit all show.

#ifndef GUEST_H
#define GUEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static const char *prog_name = "guest";

// ---- reporting -------------------------------------------------------------

// fail prints one line and ends the process at once. It uses write(2) and no
// stdio buffer, because it may run in a child of a multithreaded process.
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *fmt, ...) {
  char buf[2048];
  int n = snprintf(buf, sizeof buf, "FAIL %s pid=%d tid=%ld: ", prog_name, getpid(),
                   (long)syscall(SYS_gettid));
  va_list ap;
  va_start(ap, fmt);
  n += vsnprintf(buf + n, sizeof buf - n - 2, fmt, ap);
  va_end(ap);
  if (n > (int)sizeof buf - 2) n = sizeof buf - 2;
  buf[n++] = '\n';
  ssize_t w = write(1, buf, n);
  (void)w;
  _exit(1);
}

#define die(what) fail("%s:%d: %s: %s", __FILE__, __LINE__, what, strerror(errno))
#define must(cond, what)     \
  do {                       \
    if (!(cond)) die(what);  \
  } while (0)

// Names of operations that this kernel refuses. They are printed at the end,
// so that a test which silently covers nothing can be told apart.
static char unsupported_names[32][24];
static atomic_int unsupported_count;
static pthread_mutex_t unsupported_mu = PTHREAD_MUTEX_INITIALIZER;

__attribute__((unused)) static void unsupported(const char *what) {
  pthread_mutex_lock(&unsupported_mu);
  int n = atomic_load(&unsupported_count), i;
  for (i = 0; i < n; i++)
    if (!strcmp(unsupported_names[i], what)) break;
  if (i == n && n < 32) {
    snprintf(unsupported_names[n], sizeof unsupported_names[n], "%s", what);
    atomic_store(&unsupported_count, n + 1);
  }
  pthread_mutex_unlock(&unsupported_mu);
}

__attribute__((unused)) static const char *unsupported_list(void) {
  static char buf[32 * 25];
  size_t n = 0;
  buf[0] = 0;
  for (int i = 0; i < atomic_load(&unsupported_count); i++)
    n += snprintf(buf + n, sizeof buf - n, "%s%s", i ? "," : "", unsupported_names[i]);
  return n ? buf : "none";
}

// ---- time ------------------------------------------------------------------

__attribute__((unused)) static int64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

__attribute__((unused)) static void sleep_ms(long ms) {
  struct timespec ts = {ms / 1000, ms % 1000 * 1000000};
  while (nanosleep(&ts, &ts) < 0 && errno == EINTR) {
  }
}

// ---- random numbers and page contents --------------------------------------

static inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

struct rng {
  uint64_t s;
};

static inline uint64_t rnd(struct rng *r) { return mix(r->s += 0x9e3779b97f4a7c15ULL); }
static inline uint64_t below(struct rng *r, uint64_t n) { return n ? rnd(r) % n : 0; }

// The classes differ in how they compress, so that every representation the
// backend knows is used: zero pages, constant pages, text, tables of words,
// incompressible bytes, nearly empty pages, small changes against a common
// base, exact duplicates, and pages on the edge of what pays off.
enum page_class { C_ZERO, C_CONST, C_TEXT, C_WORDS, C_RANDOM, C_SPARSE, C_NEAR, C_DUP, C_EDGE };

static const uint8_t class_table[16] = {C_ZERO,  C_CONST,  C_TEXT,   C_TEXT,   C_TEXT, C_WORDS,
                                        C_WORDS, C_WORDS,  C_RANDOM, C_RANDOM, C_RANDOM, C_SPARSE,
                                        C_NEAR,  C_NEAR,   C_DUP,    C_EDGE};

static void gen_random(uint8_t *p, size_t n, uint64_t h) {
  for (size_t i = 0; i + 8 <= n; i += 8) {
    h ^= h << 13;
    h ^= h >> 7;
    h ^= h << 17;
    memcpy(p + i, &h, 8);
  }
}

static void gen_text(uint8_t *p, size_t n, uint64_t h) {
  static const char *const words[32] = {
      "the ",    "page ",   "of ",     "memory ", "return ", "if ",     "self.", "import ",
      "def ",    "value ",  "= ",      "(x, y) ", "\n    ",  "while ",  "0x1f ", "struct ",
      "static ", "restore", "evict ",  "error: ", "None ",   "/usr/lib", "json ", "{\"id\": ",
      "true, ",  "false ",  "[1, 2] ", "test_ ",  "class ",  "int ",    "} ",    "for i in "};
  size_t i = 0;
  h |= 1;
  while (i < n) {
    h ^= h << 13;
    h ^= h >> 7;
    h ^= h << 17;
    const char *w = words[h & 31];
    while (*w && i < n) p[i++] = *w++;
  }
}

static void gen_words(uint8_t *p, size_t n, uint64_t h) {
  uint64_t base = 0x7f0000000000ULL | (h & 0xffffffff000ULL), step = 16 + (h & 0x70);
  for (size_t i = 0; i + 8 <= n; i += 8) {
    uint64_t v = (i & 24) == 24 ? (h >> 48) : base + i / 8 * step;
    memcpy(p + i, &v, 8);
  }
}

struct page {
  uint64_t key;      // which page this is
  uint32_t ver;      // 0: never written, reads as zeros
  uint16_t patches;  // small writes since the last whole write
  uint16_t cut;      // if not 0, bytes from here on are zero
};

static void patch_at(const struct page *pg, unsigned k, uint16_t *off, uint64_t *val) {
  uint64_t h = mix(pg->key ^ ((uint64_t)pg->ver << 20) ^ k);
  *off = (h % 512) * 8;
  *val = mix(h);
}

static void page_content(uint8_t *p, const struct page *pg) {
  if (pg->ver == 0) {
    memset(p, 0, PAGE);
  } else {
    uint64_t h = mix(mix(pg->key) ^ pg->ver);
    switch (class_table[h & 15]) {
      case C_ZERO:
        memset(p, 0, PAGE);
        break;
      case C_CONST:
        memset(p, (h >> 8) & 0xff, PAGE);
        break;
      case C_TEXT:
        gen_text(p, PAGE, h);
        break;
      case C_WORDS:
        gen_words(p, PAGE, h);
        break;
      case C_RANDOM:
        gen_random(p, PAGE, h);
        break;
      case C_SPARSE:
        memset(p, 0, PAGE);
        for (int i = 0; i < 5; i++) {
          uint64_t v = mix(h + i);
          memcpy(p + v % 512 * 8, &v, 8);
        }
        break;
      case C_NEAR:
        gen_random(p, PAGE, mix(h >> 60));
        for (int i = 0; i < 7; i++) {
          uint64_t v = mix(h + i);
          memcpy(p + v % 512 * 8, &v, 8);
        }
        break;
      case C_DUP:
        gen_text(p, PAGE / 2, mix((h >> 60) & 3));
        gen_random(p + PAGE / 2, PAGE / 2, mix((h >> 60) & 3));
        break;
      case C_EDGE: {
        size_t cut = (h >> 16) % 513 * 8;
        gen_random(p, cut, h);
        gen_text(p + cut, PAGE - cut, h >> 3);
        break;
      }
    }
  }
  for (unsigned k = 1; k <= pg->patches; k++) {
    uint16_t off;
    uint64_t val;
    patch_at(pg, k, &off, &val);
    memcpy(p + off, &val, 8);
  }
  if (pg->cut) memset(p + pg->cut, 0, PAGE - pg->cut);
}

static int all_zero(const uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (p[i]) return 0;
  return 1;
}

// page_check compares a page with what the model says. On a mismatch it looks
// for what the page holds instead, because "an older version" and "zeros" and
// "another page" point at different mistakes.
static void page_check(const void *actual, const struct page *pg, const char *where, size_t idx,
                       const char *how) {
  uint8_t want[PAGE];
  page_content(want, pg);
  if (__builtin_expect(memcmp(actual, want, PAGE) == 0, 1)) return;
  uint8_t got[PAGE], again[PAGE];
  memcpy(got, actual, PAGE);
  size_t first = 0, last = 0, count = 0;
  for (size_t i = 0; i < PAGE; i++)
    if (got[i] != want[i]) {
      if (!count) first = i;
      last = i;
      count++;
    }
  char what[160] = "bytes unknown to this page";
  if (count == 0) {
    snprintf(what, sizeof what, "the second look found the right bytes: a transient wrong read");
  } else if (all_zero(got, PAGE)) {
    snprintf(what, sizeof what, "all zeros");
  } else {
    for (int d = 0; d < 64; d++) {
      struct page old = *pg;
      old.cut = 0;
      if (d <= pg->patches) {
        old.patches = pg->patches - d;
      } else {
        if (pg->ver <= (uint32_t)d) break;
        old.ver = pg->ver - d;
        old.patches = 0;
      }
      page_content(again, &old);
      if (!memcmp(got, again, PAGE)) {
        snprintf(what, sizeof what, "an older state: ver=%u patches=%u", old.ver, old.patches);
        break;
      }
    }
  }
  memcpy(again, actual, PAGE);
  const char *stable = memcmp(again, got, PAGE) ? "changes between reads"
                       : memcmp(again, want, PAGE) ? "stays wrong"
                                                   : "is right on the last read";
  char hw[40], hg[40];
  size_t o = first & ~7UL;
  for (int i = 0; i < 16; i++) {
    snprintf(hw + 2 * i, 3, "%02x", o + i < PAGE ? want[o + i] : 0);
    snprintf(hg + 2 * i, 3, "%02x", o + i < PAGE ? got[o + i] : 0);
  }
  fail("%s page %zu at %p by %s: key=%016llx ver=%u patches=%u cut=%u class=%d: %zu wrong bytes in "
       "[%zu,%zu], want %s got %s; holds %s; %s",
       where, idx, actual, how, (unsigned long long)pg->key, pg->ver, pg->patches, pg->cut,
       pg->ver ? class_table[mix(mix(pg->key) ^ pg->ver) & 15] : -1, count, first, last, hw, hg, what,
       stable);
}

// ---- regions ---------------------------------------------------------------

enum region_kind { R_PRIVATE, R_SHARED, R_TMPFS, R_OVERLAY, R_MEMFD, R_SYSV, R_SPARSE };

static const char *const region_kind_names[] = {"private", "shared", "tmpfs", "overlay",
                                                "memfd",   "sysv",   "sparse"};

struct region {
  enum region_kind kind;
  char name[32];
  uint8_t *base;
  uint8_t *alias;  // a second mapping of the same pages, or NULL
  size_t n;        // pages
  size_t span;     // pages of address space, for R_SPARSE
  size_t *slot;    // R_SPARSE: where page i lies
  struct page *pg;
  int fd;
  uint64_t seed;
  size_t lock_at, lock_n;  // pages that are mlocked
};

static inline uint8_t *page_at(const struct region *r, size_t i) {
  return r->base + (r->slot ? r->slot[i] : i) * PAGE;
}

static inline int region_private(const struct region *r) {
  return r->kind == R_PRIVATE || r->kind == R_SPARSE;
}

static inline int region_file(const struct region *r) {
  return r->kind == R_TMPFS || r->kind == R_OVERLAY || r->kind == R_MEMFD;
}

static atomic_uint version_counter = 1;

static inline uint32_t new_version(void) { return atomic_fetch_add(&version_counter, 1); }

__attribute__((unused)) static void page_verify(const struct region *r, size_t i, const char *how) {
  page_check(page_at(r, i), &r->pg[i], r->name, i, how);
}

// page_write gives page i new content through an ordinary store.
__attribute__((unused)) static void page_write(struct region *r, size_t i) {
  struct page *pg = &r->pg[i];
  pg->key = mix(r->seed ^ (i + 1));
  pg->ver = new_version();
  pg->patches = pg->cut = 0;
  page_content(page_at(r, i), pg);
}

// page_patch changes eight bytes: the write that an evictor loses most easily,
// because the rest of the page must be restored first.
__attribute__((unused)) static void page_patch(struct region *r, size_t i) {
  struct page *pg = &r->pg[i];
  if (pg->cut || pg->patches >= 24) {
    page_write(r, i);
    return;
  }
  if (!pg->key) pg->key = mix(r->seed ^ (i + 1));
  pg->patches++;
  uint16_t off;
  uint64_t val;
  patch_at(pg, pg->patches, &off, &val);
  *(volatile uint64_t *)(page_at(r, i) + off) = val;
}

__attribute__((unused)) static void region_verify(const struct region *r, const char *how) {
  for (size_t i = 0; i < r->n; i++) {
    page_verify(r, i, how);
    if (r->alias) page_check(r->alias + i * PAGE, &r->pg[i], r->name, i, "second mapping");
  }
}

static void *map_or_die(size_t n, int prot, int flags, int fd) {
  void *p = mmap(NULL, n * PAGE, prot, flags, fd, 0);
  must(p != MAP_FAILED, "mmap");
  return p;
}

// region_new makes a region of n zero pages. dir is where files go.
__attribute__((unused)) static void region_new(struct region *r, enum region_kind kind, size_t n,
                                               uint64_t seed, const char *dir) {
  static atomic_int serial;
  const int rw = PROT_READ | PROT_WRITE;
  memset(r, 0, sizeof *r);
  r->kind = kind;
  r->n = n;
  r->seed = seed;
  r->fd = -1;
  r->pg = calloc(n, sizeof *r->pg);
  must(r->pg, "calloc");
  int id = atomic_fetch_add(&serial, 1);
  snprintf(r->name, sizeof r->name, "%s#%d", region_kind_names[kind], id);
  switch (kind) {
    case R_PRIVATE:
      r->base = map_or_die(n, rw, MAP_PRIVATE | MAP_ANONYMOUS, -1);
      break;
    case R_SHARED:
      r->base = map_or_die(n, rw, MAP_SHARED | MAP_ANONYMOUS, -1);
      break;
    case R_SPARSE: {
      struct rng g = {seed};
      r->span = 4UL << 20;  // 16 GiB
      r->base = map_or_die(r->span, rw, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
      r->slot = calloc(n, sizeof *r->slot);
      must(r->slot, "calloc");
      for (size_t i = 0; i < n; i++) r->slot[i] = r->span / n * i + below(&g, r->span / n);
      break;
    }
    case R_TMPFS:
    case R_OVERLAY: {
      char path[256];
      snprintf(path, sizeof path, "%s/guest-%d-%d", dir, getpid(), id);
      r->fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
      must(r->fd >= 0, path);
      must(unlink(path) == 0, path);
      break;
    }
    case R_MEMFD:
      r->fd = syscall(SYS_memfd_create, r->name, 0);
      must(r->fd >= 0, "memfd_create");
      break;
    case R_SYSV: {
      int shm = shmget(IPC_PRIVATE, n * PAGE, IPC_CREAT | 0600);
      must(shm >= 0, "shmget");
      r->base = shmat(shm, NULL, 0);
      must(r->base != (void *)-1, "shmat");
      r->alias = shmat(shm, NULL, 0);
      must(r->alias != (void *)-1, "shmat");
      must(shmctl(shm, IPC_RMID, NULL) == 0, "shmctl");
      break;
    }
  }
  if (region_file(r)) {
    must(ftruncate(r->fd, n * PAGE) == 0, "ftruncate");
    r->base = map_or_die(n, rw, MAP_SHARED, r->fd);
    r->alias = map_or_die(n, rw, MAP_SHARED, r->fd);
  }
}

// ---- expected faults -------------------------------------------------------

static __thread sigjmp_buf *volatile fault_jump;
static __thread volatile int fault_signal;

static void on_fault(int sig, siginfo_t *si, void *uc) {
  (void)uc;
  if (fault_jump) {
    fault_signal = sig;
    siglongjmp(*fault_jump, 1);
  }
  fail("unexpected signal %d (code %d) at address %p", sig, si->si_code, si->si_addr);
}

__attribute__((unused)) static void install_fault_handlers(void) {
  struct sigaction sa;
  memset(&sa, 0, sizeof sa);
  sa.sa_sigaction = on_fault;
  sa.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&sa.sa_mask);
  must(!sigaction(SIGSEGV, &sa, NULL) && !sigaction(SIGBUS, &sa, NULL) &&
           !sigaction(SIGILL, &sa, NULL),
       "sigaction");
}

// access_signal touches one byte and returns the signal it raised, or 0.
__attribute__((unused)) static int access_signal(volatile uint8_t *p, int write) {
  sigjmp_buf jb;
  fault_signal = 0;
  if (sigsetjmp(jb, 1) == 0) {
    fault_jump = &jb;
    if (write)
      *p = *p;
    else
      (void)*p;
  }
  fault_jump = NULL;
  return fault_signal;
}

// ---- options ---------------------------------------------------------------

__attribute__((unused)) static long opt_num(int argc, char **argv, const char *name, long def) {
  size_t n = strlen(name);
  for (int i = 1; i < argc; i++)
    if (!strncmp(argv[i], "--", 2) && !strncmp(argv[i] + 2, name, n) && argv[i][n + 2] == '=')
      return strtol(argv[i] + n + 3, NULL, 0);
  return def;
}

__attribute__((unused)) static const char *opt_str(int argc, char **argv, const char *name,
                                                   const char *def) {
  size_t n = strlen(name);
  for (int i = 1; i < argc; i++)
    if (!strncmp(argv[i], "--", 2) && !strncmp(argv[i] + 2, name, n) && argv[i][n + 2] == '=')
      return argv[i] + n + 3;
  return def;
}

#endif

// kinds holds every kind of memory that an application can have, in a family of
// processes, and can tell at any time what each byte of it has to be. It runs as
// init, is checkpointed after READY and restored into clones.
//
//   kinds --mb=64 --seed=1
//
// Requests, answered by all processes: "verify" checks everything, "work N" does
// N random operations, "sum" prints a digest of all memory (equal in clones that
// have not worked, and without eviction too), "quit".

#include "guest.h"

#include <sys/prctl.h>
#include <sys/socket.h>

#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)
#define MAXREG 24
#define NCHILDREN 3

// What one may do with a region besides reading and writing it.
enum { MOVE = 1, DONTNEED = 2, RDONLY = 4, LOCKED = 8, EXEC = 16 };

static struct reg {
  struct region r;
  int may;
} regs[MAXREG];
static int nregs;
static struct region common;  // shared by all processes: process k has every fourth page
static int me;                // 0 is the parent
static struct rng g;

static struct reg *add(enum region_kind kind, size_t n, const char *name, int may, uint64_t seed) {
  struct reg *x = &regs[nregs++];
  if (nregs > MAXREG) fail("too many regions");
  region_new(&x->r, kind, n, mix(seed), kind == R_OVERLAY ? "/var" : "/dev/shm");
  snprintf(x->r.name, sizeof x->r.name, "%s", name);
  x->may = may;
  return x;
}

static void fill(struct reg *x) {
  for (size_t i = 0; i < x->r.n; i++)
    if (below(&g, 12)) page_write(&x->r, i);
}

// A region's writes may need its protection changed.
static void unprotect(struct reg *x) {
  if (x->may & RDONLY) must(mprotect(x->r.base, x->r.n * PAGE, RW) == 0, "mprotect");
}
static void protect(struct reg *x) {
  if (x->may & RDONLY) must(mprotect(x->r.base, x->r.n * PAGE, PROT_READ) == 0, "mprotect");
}

// ---- code that was written at run time ---------------------------------------

// One function per page; each returns a number that belongs to the page.
#define CODE_PAGES 48
static uint8_t *code[2];  // writable and executable at once, and by turns
static uint32_t code_val[2][CODE_PAGES];

static void emit(int k, size_t i) {
  uint32_t v = rnd(&g);
  uint8_t b[6] = {0xb8, 0, 0, 0, 0, 0xc3}, *at = code[k] + i * PAGE + (i * 64) % 2048;
  memcpy(b + 1, &v, 4);
  if (k) must(mprotect(code[k] + i * PAGE, PAGE, RW) == 0, "mprotect");
  memcpy(at, b, 6);
  if (k) must(mprotect(code[k] + i * PAGE, PAGE, PROT_READ | PROT_EXEC) == 0, "mprotect");
  code_val[k][i] = v;
}

static void call(int k, size_t i) {
  uint32_t (*f)(void) = (uint32_t(*)(void))(uintptr_t)(code[k] + i * PAGE + (i * 64) % 2048);
  uint32_t v = f();
  if (v != code_val[k][i]) fail("function %zu in %s memory returns %08x, not %08x", i, k ? "RX" : "RWX", v, code_val[k][i]);
}

// ---- a deep stack ----------------------------------------------------------------

#define DEPTH 256
#define WORDS 300
static uint64_t *frames[DEPTH];
static uint64_t frame_key[DEPTH];
static pthread_mutex_t deep_mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t deep_cond = PTHREAD_COND_INITIALIZER;
static int deep_ready, deep_quit;

__attribute__((noinline)) static void dive(int d) {
  volatile uint64_t frame[WORDS];
  frames[d] = (uint64_t *)frame;
  for (int i = 0; i < WORDS; i++) frame[i] = mix(frame_key[d] + i);
  if (d + 1 < DEPTH) {
    dive(d + 1);
  } else {
    pthread_mutex_lock(&deep_mu);
    deep_ready = 1;
    pthread_cond_broadcast(&deep_cond);
    while (!deep_quit) pthread_cond_wait(&deep_cond, &deep_mu);
    pthread_mutex_unlock(&deep_mu);
  }
  // Keeps the frame alive.
  if (frame[0] != mix(frame_key[d])) fail("stack frame %d changed", d);
}

static void *deep_main(void *arg) {
  (void)arg;
  dive(0);
  return NULL;
}

static void frame_verify(int d) {
  for (int i = 0; i < WORDS; i++)
    if (((volatile uint64_t *)frames[d])[i] != mix(frame_key[d] + i)) fail("word %d of frame %d on a thread's stack changed", i, d);
}

// ---- the heap ---------------------------------------------------------------------

#define NODES 1500
static struct node {
  uint64_t key;
  size_t n;
  uint8_t b[];
} *nodes[NODES];

static void node_make(size_t i) {
  size_t n = 8 + below(&g, i % 50 ? 2000 : 200000);
  free(nodes[i]);
  nodes[i] = malloc(sizeof *nodes[i] + n + 8);
  must(nodes[i], "malloc");
  nodes[i]->key = rnd(&g);
  nodes[i]->n = n & ~7UL;
  gen_random(nodes[i]->b, nodes[i]->n, nodes[i]->key | 1);
}

static void node_verify(size_t i) {
  uint64_t h = nodes[i]->key | 1;
  for (size_t k = 0; k < nodes[i]->n; k += 8) {
    uint64_t v;
    h ^= h << 13;
    h ^= h >> 7;
    h ^= h << 17;
    memcpy(&v, nodes[i]->b + k, 8);
    if (v != h) fail("heap node %zu, byte %zu of %zu: want %016llx got %016llx", i, k, nodes[i]->n, (unsigned long long)h,
                     (unsigned long long)v);
  }
}

// ---- files that nobody has mapped, and what is under way ------------------------------

#define FILE_PAGES 300
static struct {
  int fd;
  struct page pg[FILE_PAGES];
} files[2];

static void file_write(int k, size_t i) {
  uint8_t b[PAGE];
  files[k].pg[i] = (struct page){mix(i + k * 1000), new_version(), 0, 0};
  page_content(b, &files[k].pg[i]);
  must(pwrite(files[k].fd, b, PAGE, i * 2 * PAGE) == (ssize_t)PAGE, "pwrite");  // every other page is a hole
}

static void file_verify(int k, size_t i) {
  uint8_t b[2 * PAGE];
  memset(b, 1, sizeof b);
  must(pread(files[k].fd, b, 2 * PAGE, i * 2 * PAGE) == 2 * PAGE, "pread");
  page_check(b, &files[k].pg[i], k ? "overlay file" : "tmpfs file", i, "pread");
  if (!all_zero(b + PAGE, PAGE)) fail("file %d: the hole after page %zu is not zero", k, i);
}

#define PENDING 30000
static int pend_pipe[2], pend_sock[2];
static uint64_t pend_seed;

static void pending_put(void) {
  uint8_t b[PENDING];
  gen_text(b, sizeof b, pend_seed);
  must(write(pend_pipe[1], b, sizeof b) == (ssize_t)sizeof b, "write to pipe");
  must(write(pend_sock[1], b, sizeof b) == (ssize_t)sizeof b, "write to socket");
}

static void pending_check(void) {
  uint8_t want[PENDING], b[PENDING];
  gen_text(want, sizeof want, pend_seed);
  for (int k = 0; k < 2; k++) {
    int fd = k ? pend_sock[0] : pend_pipe[0];
    for (size_t n = 0; n < sizeof b;) {
      ssize_t r = read(fd, b + n, sizeof b - n);
      must(r > 0, "read of pending data");
      n += r;
    }
    if (memcmp(b, want, sizeof b)) fail("pending %s data is wrong", k ? "socket" : "pipe");
  }
  pend_seed++;
  pending_put();
}

// The program's own file, mapped, against what read(2) says.
static const uint8_t *self_map;
static int self_fd;
static size_t self_pages;

static void self_verify(size_t i) {
  uint8_t b[PAGE];
  must(pread(self_fd, b, PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
  if (memcmp(b, self_map + i * PAGE, PAGE)) fail("page %zu of the program's file: a mapping differs from read(2)", i);
}

// Initialised and zero data of the program itself.
static uint64_t data_words[4096] = {1};
static uint64_t bss_words[4096];

// ---- everything ---------------------------------------------------------------------------

static void verify(void) {
  for (int i = 0; i < nregs; i++) region_verify(&regs[i].r, "check");
  for (size_t i = me; i < common.n; i += NCHILDREN + 1) page_verify(&common, i, "check");
  for (int i = 0; i < 4096; i++)
    if (data_words[i] != mix(i + 1) || bss_words[i] != mix(i + 2)) fail("word %d of the program's data changed", i);
  if (me) return;
  for (int k = 0; k < 2; k++) {
    for (size_t i = 0; i < CODE_PAGES; i++) call(k, i);
    for (size_t i = 0; i < FILE_PAGES; i++) file_verify(k, i);
  }
  for (int d = 0; d < DEPTH; d++) frame_verify(d);
  for (size_t i = 0; i < NODES; i++) node_verify(i);
  for (size_t i = 0; i < self_pages; i++) self_verify(i);
  pending_check();
}

static void forked_check(void) {
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid == 0) {
    for (int k = 0; k < 40; k++) {
      struct reg *x = &regs[below(&g, nregs)];
      size_t i = below(&g, x->r.n);
      page_verify(&x->r, i, "load in a forked child");
      if (region_private(&x->r) && !(x->may & RDONLY)) {
        page_write(&x->r, i);
        page_verify(&x->r, i, "load in a forked child after a store");
      }
    }
    _exit(0);
  }
  for (int k = 0; k < 20; k++) {
    struct reg *x = &regs[below(&g, nregs)];
    if (!region_private(&x->r) || (x->may & RDONLY)) continue;
    page_patch(&x->r, below(&g, x->r.n));
  }
  int st;
  must(waitpid(pid, &st, 0) == pid, "waitpid");
  if (st) fail("a forked child ended with status %#x", st);
}

static void move(struct reg *x) {
  size_t len = x->r.n * PAGE;
  uint8_t *to = mmap(NULL, len, PROT_NONE, ANON | MAP_NORESERVE, -1, 0);
  must(to != MAP_FAILED, "mmap");
  must(mremap(x->r.base, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to, "mremap");
  x->r.base = to;
}

static void work(long n) {
  uint8_t buf[PAGE];
  while (n--) {
    struct reg *x = &regs[below(&g, nregs)];
    struct region *r = &x->r;
    size_t i = below(&g, r->n);
    switch (below(&g, 12)) {
      case 0:
      case 1:
        unprotect(x);
        page_write(r, i);
        protect(x);
        break;
      case 2:
      case 3:
        unprotect(x);
        page_patch(r, i);
        protect(x);
        break;
      case 4:
      case 5:
        page_verify(r, i, "load");
        break;
      case 6:
        if (!(x->may & DONTNEED)) break;
        must(madvise(page_at(r, i), PAGE, MADV_DONTNEED) == 0, "madvise");
        if (region_private(r)) memset(&r->pg[i], 0, sizeof r->pg[i]);
        page_verify(r, i, "load after DONTNEED");
        break;
      case 7:
        if (region_file(r)) {
          must(pread(r->fd, buf, PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
          page_check(buf, &r->pg[i], r->name, i, "pread");
        } else if ((x->may & MOVE) && below(&g, 20) == 0) {
          move(x);
        }
        break;
      case 8:
        i = below(&g, common.n / (NCHILDREN + 1)) * (NCHILDREN + 1) + me;
        page_verify(&common, i, "load");
        page_patch(&common, i);
        break;
      case 9:
        if (me) break;
        i = below(&g, CODE_PAGES);
        call(i & 1, i);
        emit(i & 1, i);
        call(i & 1, i);
        break;
      case 10:
        if (me) break;
        i = below(&g, NODES);
        node_verify(i);
        node_make(i);
        i = below(&g, FILE_PAGES);
        file_verify(i & 1, i);
        file_write(i & 1, i);
        i = below(&g, DEPTH);
        frame_verify(i);
        frame_key[i] = rnd(&g);
        for (int k = 0; k < WORDS; k++) ((volatile uint64_t *)frames[i])[k] = mix(frame_key[i] + k);
        break;
      case 11:
        if (below(&g, 40) == 0) forked_check();
        break;
    }
  }
}

static uint64_t digest(void) {
  uint64_t h = 1469598103934665603ULL;
  for (int k = 0; k < nregs; k++)
    for (size_t i = 0; i < regs[k].r.n; i++) {
      const uint64_t *p = (const uint64_t *)page_at(&regs[k].r, i);
      for (size_t j = 0; j < PAGE / 8; j++) h = (h ^ p[j]) * 1099511628211ULL;
    }
  return h;
}

static void answer(const char *req, char *out, size_t n) {
  if (!strcmp(req, "verify")) {
    verify();
    snprintf(out, n, "OK verify");
  } else if (!strncmp(req, "work ", 5)) {
    work(atol(req + 5));
    snprintf(out, n, "OK work");
  } else if (!strcmp(req, "sum")) {
    snprintf(out, n, "OK sum %016llx", (unsigned long long)digest());
  } else {
    fail("unknown request %.40s", req);
  }
}

// setup makes what only one process has.
static void setup(uint64_t seed, size_t pages) {
  static const struct {
    enum region_kind kind;
    const char *name;
    int share, may;
  } plan[] = {{R_PRIVATE, "private", 6, MOVE | DONTNEED},
              {R_SHARED, "shared", 3, DONTNEED},
              {R_TMPFS, "tmpfs", 3, DONTNEED},
              {R_OVERLAY, "overlay", 3, DONTNEED},
              {R_MEMFD, "memfd", 3, DONTNEED},
              {R_SYSV, "sysv", 2, 0},
              {R_SPARSE, "sparse", 2, DONTNEED},
              {R_PRIVATE, "read-only", 2, RDONLY},
              {R_PRIVATE, "locked", 2, LOCKED},
              {R_PRIVATE, "executable", 2, EXEC | MOVE}};
  for (size_t k = 0; k < sizeof plan / sizeof plan[0]; k++) {
    size_t n = pages * plan[k].share / 40;
    struct reg *x = add(plan[k].kind, n < 16 ? 16 : n, plan[k].name, plan[k].may, seed + k);
    if (x->may & EXEC) must(mprotect(x->r.base, x->r.n * PAGE, RW | PROT_EXEC) == 0, "mprotect");
    fill(x);
    if (x->may & LOCKED) must(mlock(x->r.base, x->r.n * PAGE) == 0, "mlock");
    protect(x);
  }
}

// setup_parent makes what only the parent has.
static void setup_parent(uint64_t seed, size_t pages) {
  // Large and aligned, with and without huge pages.
  for (int k = 0; k < 2; k++) {
    size_t n = pages / 8 & ~511UL;
    if (n < 1024) n = 1024;
    struct reg *x = add(R_PRIVATE, 16, k ? "huge" : "large", DONTNEED, seed + 100 + k);
    free(x->r.pg);
    x->r.pg = calloc(n, sizeof *x->r.pg);
    uint8_t *p = mmap(NULL, (n + 512) * PAGE, RW, ANON | (k ? 0 : MAP_POPULATE), -1, 0);
    must(p != MAP_FAILED && x->r.pg, "mmap");
    x->r.base = (uint8_t *)(((uintptr_t)p + (512 * PAGE - 1)) & ~(512 * PAGE - 1));
    x->r.n = n;
    if (k && madvise(x->r.base, n * PAGE, MADV_HUGEPAGE)) unsupported("MADV_HUGEPAGE");
    fill(x);
  }
  // Private mappings of files, a part of each written to.
  for (int k = 0; k < 2; k++) {
    struct reg *f = add(k ? R_OVERLAY : R_TMPFS, pages / 40, "file below", 0, seed + 110 + k);
    fill(f);
    struct reg *x = add(R_PRIVATE, 16, "private file", 0, seed + 110 + k);
    free(x->r.pg);
    x->r.n = f->r.n;
    x->r.pg = calloc(x->r.n, sizeof *x->r.pg);
    must(x->r.pg, "calloc");
    memcpy(x->r.pg, f->r.pg, x->r.n * sizeof *x->r.pg);
    x->r.base = map_or_die(x->r.n, RW, MAP_PRIVATE, f->r.fd);
    // All of it is the process's own from here on: below, the file changes.
    for (size_t i = 0; i < x->r.n; i++) *(volatile uint8_t *)page_at(&x->r, i) += 0;
    for (size_t i = 0; i < x->r.n; i += 3) page_write(&x->r, i);
  }
  code[0] = map_or_die(CODE_PAGES, RW | PROT_EXEC, ANON, -1);
  code[1] = map_or_die(CODE_PAGES, RW, ANON, -1);
  for (int k = 0; k < 2; k++)
    for (size_t i = 0; i < CODE_PAGES; i++) emit(k, i);
  for (size_t i = 0; i < NODES; i++) node_make(i);
  for (int k = 0; k < 2; k++) {
    char path[64];
    snprintf(path, sizeof path, "%s/unmapped-%d", k ? "/var" : "/dev/shm", getpid());
    files[k].fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    must(files[k].fd >= 0 && unlink(path) == 0 && ftruncate(files[k].fd, FILE_PAGES * 2 * PAGE) == 0, path);
    for (size_t i = 0; i < FILE_PAGES; i++) file_write(k, i);
  }
  must(pipe(pend_pipe) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pend_sock) == 0, "pipe");
  pend_seed = seed;
  pending_put();
  self_fd = open("/proc/self/exe", O_RDONLY);
  struct stat st;
  must(self_fd >= 0 && fstat(self_fd, &st) == 0, "/proc/self/exe");
  self_pages = st.st_size / PAGE;
  self_map = map_or_die(self_pages, PROT_READ, MAP_PRIVATE, self_fd);
  for (int d = 0; d < DEPTH; d++) frame_key[d] = rnd(&g);
  pthread_t th;
  must(pthread_create(&th, NULL, deep_main, NULL) == 0, "pthread_create");
  pthread_mutex_lock(&deep_mu);
  while (!deep_ready) pthread_cond_wait(&deep_cond, &deep_mu);
  pthread_mutex_unlock(&deep_mu);
}

static int read_line(int fd, char *buf, size_t n) {
  size_t k = 0;
  while (k + 1 < n) {
    ssize_t r = read(fd, buf + k, 1);
    if (r < 0 && errno == EINTR) continue;
    must(r >= 0, "read");
    if (r == 0) return 0;
    if (buf[k] == '\n') break;
    k++;
  }
  buf[k] = 0;
  return 1;
}

int main(int argc, char **argv) {
  prog_name = "kinds";
  uint64_t seed = opt_num(argc, argv, "seed", 1);
  size_t pages = opt_num(argc, argv, "mb", 64) * 256;
  g.s = seed;
  install_fault_handlers();
  for (int i = 0; i < 4096; i++) {
    data_words[i] = mix(i + 1);
    bss_words[i] = mix(i + 2);
  }
  region_new(&common, R_SHARED, pages / 16 & ~(size_t)NCHILDREN, mix(seed ^ 5), "/dev/shm");
  // Inherited by all, changed by all: pages that stay shared copy-on-write in
  // the checkpoint, and pages that were.
  struct reg *x = add(R_PRIVATE, pages / 6, "inherited", DONTNEED, seed ^ 6);
  for (size_t i = 0; i < x->r.n; i++) page_write(&x->r, i);

  int down[NCHILDREN][2], up[NCHILDREN][2];
  pid_t kids[NCHILDREN];
  for (int c = 0; c < NCHILDREN; c++) {
    must(pipe(down[c]) == 0 && pipe(up[c]) == 0, "pipe");
    kids[c] = fork();
    must(kids[c] >= 0, "fork");
    if (kids[c] == 0) {
      static char name[32];
      snprintf(name, sizeof name, "kinds (child %d)", c);
      prog_name = name;
      prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
      me = c + 1;
      g.s ^= 0x77 * me;
      for (int k = 0; k < 300; k++) page_write(&regs[0].r, below(&g, regs[0].r.n));
      if (c == 0) setup(seed + 1000, pages / 4);
      // The others have nothing but what they share.
      close(down[c][1]);
      char req[128], rep[256];
      while (read_line(down[c][0], req, sizeof req)) {
        answer(req, rep, sizeof rep - 1);
        strcat(rep, "\n");
        must(write(up[c][1], rep, strlen(rep)) > 0, "write");
      }
      _exit(0);
    }
    // What one child does not have any more, the next may.
    for (int k = 0; k < 200; k++) page_write(&regs[0].r, below(&g, regs[0].r.n));
  }
  setup(seed + 2000, pages / 2);
  setup_parent(seed + 3000, pages);

  must(write(1, "READY\n", 6) == 6, "write");
  char req[128], mine[256], line[1400];
  while (read_line(0, req, sizeof req)) {
    if (!strcmp(req, "quit")) break;
    // All of them at once.
    for (int c = 0; c < NCHILDREN; c++) dprintf(down[c][1], "%s\n", req);
    answer(req, mine, sizeof mine);
    int n = snprintf(line, sizeof line, "%s", mine);
    for (int c = 0; c < NCHILDREN; c++) {
      if (!read_line(up[c][0], mine, sizeof mine)) fail("child %d is gone", c);
      n += snprintf(line + n, sizeof line - n, "; %s", mine);
    }
    n += snprintf(line + n, sizeof line - n, "\n");
    must(write(1, line, n) == n, "write");
  }
  for (int c = 0; c < NCHILDREN; c++) close(down[c][1]);
  for (int c = 0; c < NCHILDREN; c++) waitpid(kids[c], NULL, 0);
  return 0;
}

// daemon holds memory of every kind in two processes and answers one line per
// request, so that a test can evict, checkpoint, restore and clone it and ask
// at any time whether every byte is what it has to be. It runs as init.
//
//   daemon --mb=48 --seed=1
//
// Requests: "verify" checks everything, "work N" does N random operations in
// both processes, "sum" prints a digest of all memory (equal in clones of one
// image, different once they worked), "stamp X" stores X where "stamp" finds
// it, "quit".

#include "guest.h"

#include <sys/socket.h>

#define MAXREG 8
#define PENDING 24000

struct proc {
  struct region reg[MAXREG];
  int nreg;
  struct rng g;
  int pipefd[2], sock[2];  // both always hold data that was not read yet
  uint64_t pending_seed;
  char stamp[64];
};

static struct proc *me;        // on the heap, so it is evicted too
static struct region common;   // written by both processes, each its own half
static int is_child;

static void pending_put(struct proc *p) {
  uint8_t b[PENDING];
  gen_text(b, sizeof b, p->pending_seed);
  must(write(p->pipefd[1], b, sizeof b) == (ssize_t)sizeof b, "write to pipe");
  must(write(p->sock[1], b, sizeof b) == (ssize_t)sizeof b, "write to socket");
}

static void pending_check(struct proc *p) {
  uint8_t want[PENDING], b[PENDING];
  gen_text(want, sizeof want, p->pending_seed);
  for (int k = 0; k < 2; k++) {
    int fd = k ? p->sock[0] : p->pipefd[0];
    for (size_t n = 0; n < sizeof b;) {
      ssize_t r = read(fd, b + n, sizeof b - n);
      must(r > 0, "read of pending data");
      n += r;
    }
    if (memcmp(b, want, sizeof b)) fail("pending %s data is wrong", k ? "socket" : "pipe");
  }
  p->pending_seed++;
  pending_put(p);
}

static void verify(void) {
  for (int i = 0; i < me->nreg; i++) region_verify(&me->reg[i], "check");
  for (size_t i = is_child; i < common.n; i += 2) page_verify(&common, i, "check");
  pending_check(me);
}

static void work(long n) {
  uint8_t buf[PAGE];
  while (n--) {
    struct region *r = &me->reg[below(&me->g, me->nreg)];
    size_t i = below(&me->g, r->n);
    switch (below(&me->g, 8)) {
      case 0:
      case 1:
        page_write(r, i);
        break;
      case 2:
      case 3:
        page_patch(r, i);
        break;
      case 4:
        page_verify(r, i, "load");
        break;
      case 5:
        must(madvise(page_at(r, i), PAGE, MADV_DONTNEED) == 0, "madvise");
        if (region_private(r)) memset(&r->pg[i], 0, sizeof r->pg[i]);
        page_verify(r, i, "load after DONTNEED");
        break;
      case 6:
        if (region_file(r)) {
          must(pread(r->fd, buf, PAGE, i * PAGE) == (ssize_t)PAGE, "pread");
          page_check(buf, &r->pg[i], r->name, i, "pread");
        }
        break;
      case 7:
        i = (below(&me->g, common.n / 2)) * 2 + is_child;
        page_verify(&common, i, "load");
        page_patch(&common, i);
        break;
    }
  }
}

static uint64_t digest(void) {
  uint64_t h = 1469598103934665603ULL;
  for (int k = 0; k < me->nreg; k++)
    for (size_t i = 0; i < me->reg[k].n; i++) {
      const uint64_t *p = (const uint64_t *)page_at(&me->reg[k], i);
      for (size_t j = 0; j < PAGE / 8; j++) h = (h ^ p[j]) * 1099511628211ULL;
    }
  return h;
}

// answer carries out one request and writes the reply, without a newline.
static void answer(const char *req, char *out, size_t n) {
  if (!strcmp(req, "verify")) {
    verify();
    size_t pages = common.n / 2;
    for (int i = 0; i < me->nreg; i++) pages += me->reg[i].n;
    snprintf(out, n, "OK verify pages=%zu", pages);
  } else if (!strncmp(req, "work ", 5)) {
    work(atol(req + 5));
    snprintf(out, n, "OK work");
  } else if (!strcmp(req, "sum")) {
    snprintf(out, n, "OK sum %016llx", (unsigned long long)digest());
  } else if (!strncmp(req, "stamp ", 6)) {
    snprintf(me->stamp, sizeof me->stamp, "%.60s", req + 6);
    snprintf(out, n, "OK stamp %s", me->stamp);
  } else if (!strcmp(req, "stamp")) {
    snprintf(out, n, "OK stamp %s", me->stamp);
  } else {
    snprintf(out, n, "FAIL daemon: unknown request %.40s", req);
  }
}

static void setup(uint64_t seed, size_t pages) {
  static const struct {
    enum region_kind kind;
    int share;
  } plan[] = {{R_PRIVATE, 12}, {R_SHARED, 4}, {R_TMPFS, 4}, {R_OVERLAY, 4}, {R_MEMFD, 4}, {R_SYSV, 2}, {R_SPARSE, 2}};
  for (size_t k = 0; k < sizeof plan / sizeof plan[0]; k++) {
    struct region *r = &me->reg[me->nreg++];
    size_t n = pages * plan[k].share / 32;
    region_new(r, plan[k].kind, n < 16 ? 16 : n, mix(seed + k), plan[k].kind == R_OVERLAY ? "/var" : "/dev/shm");
    for (size_t i = 0; i < r->n; i++)
      if (below(&me->g, 10)) page_write(r, i);
  }
  must(pipe(me->pipefd) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, me->sock) == 0, "pipe");
  me->pending_seed = seed + 1;
  pending_put(me);
}

static void *sleeper(void *arg) {
  (void)arg;
  for (;;) sleep_ms(3600 * 1000);
  return NULL;
}

static void *waiter(void *arg) {
  pthread_mutex_t *mu = arg;
  pthread_mutex_lock(mu);  // never released
  fail("a lock that is held was taken");
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
  prog_name = "daemon";
  uint64_t seed = opt_num(argc, argv, "seed", 1);
  size_t pages = opt_num(argc, argv, "mb", 48) * 256;
  install_fault_handlers();
  me = calloc(1, sizeof *me);
  must(me, "calloc");
  me->g.s = seed;
  region_new(&common, R_SHARED, pages / 16 & ~1UL, mix(seed ^ 5), "/dev/shm");
  // One region that the child inherits and both change: copy-on-write pages
  // that stay shared across the checkpoint.
  struct region *inherited = &me->reg[me->nreg++];
  region_new(inherited, R_PRIVATE, pages / 4, mix(seed ^ 6), NULL);
  for (size_t i = 0; i < inherited->n; i++) page_write(inherited, i);

  int down[2], up[2];
  must(pipe(down) == 0 && pipe(up) == 0, "pipe");
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid == 0) {
    is_child = 1;
    prog_name = "daemon (child)";
    me->g.s ^= 0x77;
    close(down[1]);
    setup(seed + 1000, pages / 3);
    char req[128], rep[256];
    while (read_line(down[0], req, sizeof req)) {
      answer(req, rep, sizeof rep - 1);
      strcat(rep, "\n");
      must(write(up[1], rep, strlen(rep)) > 0, "write");
    }
    _exit(0);
  }
  setup(seed + 2000, pages / 3);
  static pthread_mutex_t held = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&held);
  pthread_t th;
  must(pthread_create(&th, NULL, sleeper, NULL) == 0, "pthread_create");
  must(pthread_create(&th, NULL, waiter, &held) == 0, "pthread_create");

  must(write(1, "READY\n", 6) == 6, "write");
  char req[128], mine[256], theirs[256], line[640];
  while (read_line(0, req, sizeof req)) {
    if (!strcmp(req, "quit")) break;
    answer(req, mine, sizeof mine);
    dprintf(down[1], "%s\n", req);
    if (!read_line(up[0], theirs, sizeof theirs)) fail("the child is gone");
    int n = snprintf(line, sizeof line, "%s; %s\n", mine, theirs);
    must(write(1, line, n) == n, "write");
  }
  close(down[1]);
  int st;
  must(waitpid(pid, &st, 0) == pid, "waitpid");
  return st != 0;
}

package main

// edits is every change that runsc-agentzip makes to gVisor, grouped by what
// it is for. What the inserted calls do is written where they are defined: the
// files under _overlay/. With no page backend attached (--agentzip=off) every
// one of them is a nil check.
var edits = []Edit{
	// --- The memory file: attach, grow, account ---

	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "type MemoryFile",
		Anchor: "file *os.File", Where: After, Text: `
	// backend evicts and restores pages. backend is immutable after
	// AttachPageBackend, which precedes all other use of the MemoryFile.
	backend pageBackendRef`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.extendChunksLocked",
		Anchor: "f.chunks.Store(&newChunks)", Where: Before, Text: `
	if err := f.backend.extend(newFileSize); err != nil {
		return err
	}`},
	{File: "pkg/sentry/pgalloc/save_restore.go", Decl: "MemoryFile.LoadFrom",
		Anchor: "mfTimeline.Reached(\"metadata loaded\")", Where: Before, Text: `
	if err := f.backend.extend(uint64(len(chunks)) * chunkSize); err != nil {
		return fmt.Errorf("failed to extend page backend: %w", err)
	}`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.TotalUsage",
		Anchor: "uint64(stat.Blocks * 512)", Where: Replace, Text: `uint64(stat.Blocks*512) + f.backend.evictedBytes()`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.updateUsageLocked",
		Anchor: "err := mincore(s, buf)", Where: After, Text: `
			f.backend.overlayCommitted(chunkFR, buf[:bufLen])`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.releaserDestroyLocked",
		Anchor: "if f.opts.DecommitOnDestroy {", Where: Before, Text: `
	// close waits for an eviction, which may be waiting for f.mu.
	f.mu.Unlock()
	f.backend.close()
	f.mu.Lock()`},

	// --- The memory file: gate, drop, in-flight sections ---

	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.MapInternal",
		Anchor: "chunks := ((fr.End + chunkMask) / chunkSize) - (fr.Start / chunkSize)", Where: Before, Text: `
	if err := f.backend.gate(fr); err != nil {
		return safemem.BlockSeq{}, err
	}
`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.DataFD",
		Anchor: "return f.FD(), nil", Where: Before, Text: `
	if err := f.backend.gate(fr); err != nil {
		return -1, err
	}`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.DecRef",
		Anchor: "// Cancel any pending async load on waste pages.", Where: Before, Text: `
				f.backend.drop(wasteFR)`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.Decommit",
		Anchor: "f.decommitOrManuallyZero(fr)", Where: Before, Text: `
	defer f.EnterSection().Exit()
	f.backend.decommit(fr)`},
	{File: "pkg/sentry/pgalloc/pgalloc.go", Decl: "MemoryFile.Allocate",
		Anchor: "alloc := allocState{", Where: Before, Text: `
	defer f.EnterSection().Exit()`},
	{File: "pkg/sentry/fsimpl/tmpfs/regular_file.go", Decl: "regularFileReadWriter.ReadToBlocks",
		Anchor: "rw.file.dataMu.RLock()", Where: Before, Text: `
	defer rw.file.inode.fs.mf.EnterSection().Exit()`},
	{File: "pkg/sentry/fsimpl/tmpfs/regular_file.go", Decl: "regularFileReadWriter.ReadToBlocks",
		Anchor: "// Get internal mappings.", Where: Before, Text: `
			// What only the template has is read where it is.
			if n, err := rw.file.inode.fs.mf.ReadTemplate(seg.FileRangeOf(seg.Range().Intersect(mr)), dsts); n != 0 || err != nil {
				done += n
				rw.off += n
				dsts = dsts.DropFirst64(n)
				if err != nil {
					return done, err
				}
				if rw.off == seg.End() {
					seg, gap = seg.NextNonEmpty()
				}
				continue
			}`},
	{File: "pkg/sentry/fsimpl/tmpfs/regular_file.go", Decl: "regularFileReadWriter.writeToMF",
		Anchor: "// Get internal mappings.", Where: Before, Text: `
	defer rw.file.inode.fs.mf.EnterSection().Exit()`},
	{File: "pkg/sentry/fsimpl/gofer/regular_file.go", Decl: "dentryReadWriter.ReadToBlocks",
		Anchor: "mf := rw.d.inode.fs.mf", Where: After, Text: `
	defer mf.EnterSection().Exit()`},
	{File: "pkg/sentry/fsimpl/gofer/regular_file.go", Decl: "dentryReadWriter.WriteFromBlocks",
		Anchor: "mf := rw.d.inode.fs.mf", Where: After, Text: `
	defer mf.EnterSection().Exit()`},
	{File: "pkg/sentry/fsutil/dirty_set.go", Decl: "syncDirtyRange",
		Anchor: "for cseg := cache.LowerBoundSegment(mr.Start);", Where: Before, Text: `
	defer enterFileSection(mem).Exit()`},
	{File: "pkg/sentry/fsutil/file_range_set.go", Decl: "FileRangeSet.Truncate",
		Anchor: "fr := seg.FileRange()", Where: Before, Text: `
		defer mf.EnterSection().Exit()`},

	// --- Memory that somebody maps for longer than a call: never evicted ---

	{File: "pkg/sentry/fsimpl/iouringfs/iouringfs.go", Decl: "FileDescription.mapSharedBuffers",
		Anchor: "fd.mf.MapInternal(fd.rbmf.fr,", Where: Replace, Text: `fd.mf.MapInternalPinned(fd.rbmf.fr,`},
	{File: "pkg/sentry/fsimpl/iouringfs/iouringfs.go", Decl: "FileDescription.mapSharedBuffers",
		Anchor: "fd.mf.MapInternal(fd.sqemf.fr,", Where: Replace, Text: `fd.mf.MapInternalPinned(fd.sqemf.fr,`},
	{File: "pkg/sentry/kernel/kcov.go", Decl: "kcovReadWriter.ReadToBlocks",
		Anchor: "rw.mf.MapInternal(", Where: Replace, Text: `rw.mf.MapInternalPinned(`},
	{File: "pkg/sentry/kernel/kcov.go", Decl: "kcovReadWriter.WriteFromBlocks",
		Anchor: "rw.mf.MapInternal(", Where: Replace, Text: `rw.mf.MapInternalPinned(`},
	{File: "pkg/sentry/socket/netstack/packetmmap/ring_buffer.go", Decl: "ringBuffer.internalMappingsForFrame",
		Anchor: "rb.mf.MapInternal(", Where: Replace, Text: `rb.mf.MapInternalPinned(`},
	{File: "pkg/sentry/mm/pma.go", Decl: "MemoryManager.Pin",
		Anchor: "f.IncRef(fr, memCgID)", Where: Before, Text: `
		if err := mm.pinPMALocked(pseg, psar); err != nil {
			perr = err
			break
		}`},

	// --- Memory managers: registry, gate, size of mappings ---

	{File: "pkg/sentry/mm/lifecycle.go", Decl: "NewMemoryManager",
		Anchor: "return &MemoryManager{", Where: Replace, Text: `return register(&MemoryManager{`},
	{File: "pkg/sentry/mm/lifecycle.go", Decl: "NewMemoryManager",
		Anchor: "}, nil", Where: Replace, Text: `}), nil`},
	{File: "pkg/sentry/mm/lifecycle.go", Decl: "MemoryManager.Fork",
		Anchor: "return mm2, nil", Where: Before, Text: `
	register(mm2)`},
	{File: "pkg/sentry/mm/save_restore.go", Decl: "MemoryManager.afterLoad",
		Anchor: "mm.as = as", Where: After, Text: `
		register(mm)`},
	{File: "pkg/sentry/mm/lifecycle.go", Decl: "MemoryManager.DecUsers",
		Anchor: "var droppedIDs []memmap.MappingIdentity", Where: Before, Text: `
	unregister(mm)
`},
	{File: "pkg/sentry/mm/pma.go", Decl: "pmaIterator.getInternalMappingsLocked",
		Anchor: "pma.file.MapInternal(pseg.fileRange(), perms)", Where: Replace, Text: `pgalloc.MapInternalUngated(pma.file, pseg.fileRange(), perms)`},
	{File: "pkg/sentry/mm/pma.go", Decl: "MemoryManager.internalMappingsLocked",
		Anchor: "if ar.End <= pseg.End() {\n\t\t// Since only one pma", Where: Before, Text: `
	mm.mustGate(pseg, ar)
`},
	{File: "pkg/sentry/mm/io.go", Decl: "MemoryManager.getIOMappingsLocked",
		Anchor: "offset := uint64(ar.Start - pseg.Start())", Where: Before, Text: `
		if err := mm.gatePMA(pseg, ar); err != nil {
			return safemem.BlockSeq{}, nil, err
		}`},
	{File: "pkg/sentry/mm/io.go", Decl: "MemoryManager.getIOMappingsTrackedLocked",
		Anchor: "if err := pseg.getInternalMappingsLocked(); err == nil {", Where: Replace, Text: `if err := mm.getGatedInternalMappingsLocked(pseg, pmaAR); err == nil {`},
	{File: "pkg/sentry/mm/address_space.go", Decl: "MemoryManager.mapASLocked",
		Anchor: "perms := pma.effectivePerms", Where: Before, Text: `
		if platformEffect == memmap.PlatformEffectDefault {
			win, done, err := mm.mapWindowLocked(pseg, ar, pmaMapAR)
			if err != nil {
				return err
			}
			if done {
				pseg = pseg.NextSegment()
				continue
			}
			pmaMapAR = win
		}`},
	{File: "pkg/sentry/mm/address_space.go", Decl: "MemoryManager.mapASLocked",
		Anchor: "mm.as.MapFile(pmaMapAR.Start, pma.file,", Where: Replace, Text: `mm.mapFileLocked(pma, pmaMapAR.Start,`},
	{File: "pkg/sentry/mm/address_space.go", Decl: "MemoryManager.mapASLocked",
		Anchor: "mm.as.MapFile(thisMapAR.Start, pma.file,", Where: Replace, Text: `mm.mapFileLocked(pma, thisMapAR.Start,`},
	{File: "pkg/sentry/mm/syscalls.go", Decl: "MemoryManager.HandleUserFault",
		Anchor: "mm.mapASLocked(ctx, pseg, ar, memmap.PlatformEffectDefault)", Where: Replace, Text: `mm.mapFaultLocked(ctx, pseg, ar, at)`},
	{File: "pkg/sentry/mm/mm.go", Decl: "type MemoryManager",
		Anchor: "captureInvalidations  bool", Where: Before, Text: `
	// templateMu orders, for the pages of this MemoryManager, mapping the
	// template's copy into as against replacing such mappings. It follows
	// activeMu.
	templateMu agentzipMutex ` + "`state:\"nosave\"`" + `
`},

	// --- Memory limits: nobody asks for more while there is none ---

	{File: "pkg/sentry/kernel/task_syscall.go", Decl: "Task.doSyscall",
		Anchor: "t.Arch().SyscallSaveOrig()", Where: Before, Text: `
	t.k.mf.Admit(t, t.Arch().SyscallNo())`},
	{File: "pkg/sentry/mm/syscalls.go", Decl: "MemoryManager.HandleUserFault",
		Anchor: "// Don't bother trying existingPMAsLocked;", Where: Before, Text: `
	mm.admit(ctx)
`},

	// --- Phases: what makes an idle sandbox run, and hints ---

	{File: "pkg/sentry/kernel/task_block.go", Decl: "Task.block",
		Anchor: "defer t.completeSleep()", Where: After, Text: `
	t.noteSleep()`},
	{File: "pkg/sentry/kernel/task_block.go", Decl: "Task.block",
		Anchor: "// Woken by event.", Where: Before, Text: `
		t.noteWake(false)`},
	{File: "pkg/sentry/kernel/task_block.go", Decl: "Task.block",
		Anchor: "// Ensure that Task.interrupted() will return true", Where: Before, Text: `
		t.noteWake(false)`},
	{File: "pkg/sentry/kernel/task_block.go", Decl: "Task.block",
		Anchor: "// We've timed out.", Where: Before, Text: `
		t.noteWake(true)`},
	{File: "pkg/sentry/fsimpl/proc/tasks.go", Decl: "filesystem.newTasksInode",
		Anchor: "\"sysrq-trigger\":  fs.newInode(ctx, root, 0200, newStaticFile(\"\")),", Where: After, Text: `
		"agentzip":       fs.newInode(ctx, root, 0666, newStaticFile(phaseFile)),`},

	// --- Checkpoint and restore ---

	{File: "pkg/sentry/pgalloc/save_restore.go", Decl: "MemoryFile.LoadFrom",
		Anchor: "if amfl != nil {\n\t\t\t// Record where to read data.", Where: Replace, Text: `if adopted, err := f.backend.adopt(maFR, &opts.PagesFileOffset); err != nil {
			return err
		} else if adopted {
			// The template has these pages; nothing to load.
		} else if amfl != nil {
			// Record where to read data.`},
	{File: "runsc/boot/controller.go", Decl: "type RestoreOpts",
		Anchor: "HaveDeviceFile bool", Where: After, Text: `
	// AgentzipFiles is how many files follow the others in FilePayload: those
	// of the template.
	AgentzipFiles int

	// agentzipTemplate is true once they were taken.
	agentzipTemplate bool`},
	{File: "runsc/boot/controller.go", Decl: "getRestoreReadersForLocalCheckpointFiles",
		Anchor: "stateio.NewPagesFileFDReaderDefault(int32(pagesFile.Release()))", Where: Replace, Text: `newPagesFileReader(o, int32(pagesFile.Release()))`},
	{File: "runsc/boot/controller.go", Decl: "containerManager.Restore",
		Anchor: "stateFile, pagesMetadata, pagesFile, err := getRestoreReaders(o)", Where: Before, Text: `
	if err := o.takeAgentzipFiles(); err != nil {
		return err
	}`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.Restore",
		Anchor: "conn, err := s.sandboxConnect()", Where: Before, Text: `
	if AgentzipTemplate != nil && !opt.UseCheckpointGofer && !direct {
		files, t, err := AgentzipTemplate(conf, imagePath, opt.FilePayload.Files)
		if err != nil {
			return err
		}
		opt.FilePayload.Files = append(opt.FilePayload.Files, files...)
		opt.AgentzipFiles = len(files)
		image = t
	}
`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.Restore",
		Anchor: "opt := boot.RestoreOpts{", Where: Before, Text: `
	// image is the checkpoint, if it serves as a template.
	var image AgentzipImage`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.Restore",
		Anchor: "s.Restored = true", Where: Before, Text: `
	s.agentzipStarted(conf, image)`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.StartRoot",
		Anchor: "return nil\n}", Where: Before, Text: `
	s.agentzipStarted(conf, AgentzipImage{})`},

	{File: "pkg/sentry/kernel/kernel.go", Decl: "Kernel.saveMemoryFiles",
		Anchor: "mfOpts := pgalloc.SaveOpts{", Where: Before, Text: `
	// All pages are back, and none is evicted, until the last has been
	// written: page saving reads the memory file directly, in the background.
	endSave, err := k.mf.BeginSave()
	if err != nil {
		if pagesFile != nil {
			pagesFile.Close()
		}
		return fmt.Errorf("restoring evicted pages: %w", err)
	}
	defer endSave()
`},

	// --- Start-up, control socket, command line ---

	{File: "runsc/boot/loader.go", Decl: "New",
		Anchor: "eid := execID{cid: args.ID}", Where: Before, Text: `
	if AgentzipInit != nil {
		if err := AgentzipInit(args.Conf, args.StdioFDs); err != nil {
			return nil, err
		}
	}
`},
	{File: "runsc/boot/loader.go", Decl: "createMemoryFile",
		Anchor: "return mf, nil", Where: Before, Text: `
	if err := mf.AttachPageBackend(); err != nil {
		mf.Destroy()
		return nil, err
	}`},
	{File: "runsc/sandbox/sandbox.go", Decl: "type Sandbox",
		Anchor: "ID string `json:\"id\"`", Where: After, Text: `
	// AgentzipRegistration is the file by which the page pool finds the sandbox, if
	// there is one.
	AgentzipRegistration string ` + "`json:\"agentzipRegistration,omitempty\"`" + `
`},
	{File: "runsc/container/container.go", Decl: "Container.Destroy",
		Anchor: "if err := c.Saver.Destroy(); err != nil {", Where: Before, Text: `
	// Before a sandbox of the same ID may start.
	if sb != nil && sb.IsRootContainer(c.ID) {
		sb.AgentzipDestroyed()
	}
`},
	{File: "runsc/boot/controller.go", Decl: "controller.registerHandlers",
		Anchor: "c.srv.Register(&debug{})", Where: After, Text: `
	if AgentzipControl != nil {
		if obj := AgentzipControl(l.k, l.root.conf); obj != nil {
			c.srv.Register(obj)
		}
	}`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.createSandboxProcess",
		Anchor: "// Relay all the config flags to the sandbox process.", Where: Before, Text: `
	// The page backend is linked into this binary only: a sidecar Sentry that
	// happens to be installed beside it would silently run without.
	if !sentryUsesCgo {
		bootBinPath = specutils.ExePath
	}
`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.Restore",
		Anchor: "fmt.Errorf(\"restoring container %q: %v\", cid, err)", Where: Replace, Text: `restoreError(spec, cid, imagePath, err)`},
	{File: "runsc/container/container.go", Decl: "Container.createGoferProcess",
		Anchor: "if !shouldSpawnGofer(c.Spec, conf, c.GoferMountConfs) {", Where: Before, Text: `
	if err := c.checkErofsImages(rootfsHint); err != nil {
		return nil, nil, nil, nil, err
	}`},
	{File: "pkg/sentry/fsimpl/erofs/save_restore.go", Decl: "filesystem.afterLoad",
		Anchor: "fmt.Sprintf(\"superblock mismatch detected on restore, got %+v, expected %+v\", got, want)", Where: Replace, Text: `otherImage(fs.iopts.UniqueID, got, want)`},
	{File: "runsc/sandbox/sandbox.go", Decl: "Sandbox.Wait",
		Anchor: "return s.status, nil", Where: Before, Text: `
	s.explainEnd()`},
	{File: "runsc/cgroup/cgroup.go", Decl: "memory.set",
		Anchor: `if err := setOptionalValueInt(path, "memory.limit_in_bytes", spec.Memory.Limit); err != nil {`, Where: Before, Text: `
	raiseMemswLimit(path, spec.Memory)`},
	{File: "runsc/cli/maincli/maincli.go", Decl: "commands",
		Anchor: "// Merge alias commands.", Where: Before, Text: `
	addExtraCommands(cmds)
`},
	{File: "runsc/config/config.go", Decl: "type Config",
		Anchor: "SharedRootDir string `flag:\"shared-root\"`", Where: After, Text: agentzipConfigFields},
	{File: "runsc/config/flags.go", Decl: "RegisterFlags",
		Anchor: "// These flags are unique to runsc, and are used to configure parts of the", Where: Before, Text: `
	registerAgentzipFlags(flagSet)
`},
	{File: "runsc/config/config.go", Decl: "Config.Validate",
		Anchor: "if c.Overlay && c.Overlay2.Enabled() {", Where: Before, Text: `
	if err := c.ValidateAgentzip(); err != nil {
		return err
	}`},
	{File: "runsc/specutils/specutils.go", Decl: "FixConfig",
		Anchor: "// Override does not validate the config.", Where: Before, Text: `
	if err := applyAgentzipAnnotations(conf, spec); err != nil {
		return err
	}`},
}

// agentzipConfigFields are the fields of config.Config that our flags fill;
// the flags themselves, with their documentation, are in
// _overlay/runsc/config/agentzip.go.
const agentzipConfigFields = `
	Agentzip               AgentzipMode  ` + "`flag:\"agentzip\"`" + `
	AgentzipIdle           time.Duration ` + "`flag:\"agentzip-idle\"`" + `
	AgentzipSettle         time.Duration ` + "`flag:\"agentzip-settle\"`" + `
	AgentzipDeepenAfter    time.Duration ` + "`flag:\"agentzip-deepen-after\"`" + `
	AgentzipTrimAfter      time.Duration ` + "`flag:\"agentzip-trim-after\"`" + `
	AgentzipPageoutAfter   time.Duration ` + "`flag:\"agentzip-pageout-after\"`" + `
	AgentzipMapUnit        uint          ` + "`flag:\"agentzip-map-unit\"`" + `
	AgentzipWorkers        uint          ` + "`flag:\"agentzip-workers\"`" + `
	AgentzipStoreMax       uint          ` + "`flag:\"agentzip-store-max\"`" + `
	AgentzipTemplate       string        ` + "`flag:\"agentzip-template\"`" + `
	AgentzipPrefetch       string        ` + "`flag:\"agentzip-prefetch\"`" + `
	AgentzipPool           string        ` + "`flag:\"agentzip-pool\"`" + `
	AgentzipPoolStart      bool          ` + "`flag:\"agentzip-pool-start\"`" + `
	AgentzipDomain         string        ` + "`flag:\"agentzip-domain\"`" + `
	AgentzipTestEvictEvery time.Duration ` + "`flag:\"agentzip-test-evict-every\"`" + `
	AgentzipTestCorrupt    uint          ` + "`flag:\"agentzip-test-corrupt\"`" + `
`

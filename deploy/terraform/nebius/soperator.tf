# Slurm by soperator: a filesystem for the controller's state, and the values of the charts of soperator 5.0.0.

resource "nebius_compute_v1_filesystem" "controller_spool" {
  count          = local.is_soperator ? 1 : 0
  parent_id      = var.project_id
  name           = "${var.name}-controller-spool"
  type           = "NETWORK_SSD"
  size_gibibytes = 128
}

locals {
  on_cpu_nodes = [{ key = "nebius.com/node-group-id", operator = "In", values = [nebius_mk8s_v1_node_group.cpu.id] }]
  on_gpu_nodes = [{ key = "nebius.com/node-group-id", operator = "In", values = [nebius_mk8s_v1_node_group.gpu.id] }]
  on_all_nodes = [{
    key      = "nebius.com/node-group-id"
    operator = "In"
    values   = [nebius_mk8s_v1_node_group.cpu.id, nebius_mk8s_v1_node_group.gpu.id]
  }]

  cpu_affinity = {
    nodeAffinity = {
      requiredDuringSchedulingIgnoredDuringExecution = { nodeSelectorTerms = [{ matchExpressions = local.on_cpu_nodes }] }
    }
  }
  gpu_affinity = {
    nodeAffinity = {
      requiredDuringSchedulingIgnoredDuringExecution = { nodeSelectorTerms = [{ matchExpressions = local.on_gpu_nodes }] }
    }
  }

  # Slurm's pods run on GPU nodes that are not accepted yet: the trial runs inside them.
  gpu_tolerations = [
    { key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule" },
    { key = "seatrial.dev/not-accepted", operator = "Exists", effect = "NoSchedule" },
  ]

  soperator_values = {
    soperator = {
      kruise         = { installOperator = true }
      serviceMonitor = { enabled = false }
    }

    slurm-cluster-storage = {
      volume = {
        jail            = { size = "${var.filesystem_gib}Gi" }
        controllerSpool = { size = "128Gi" }
      }
      storage = {
        jail            = { matchExpressions = local.on_all_nodes, tolerations = local.gpu_tolerations }
        controllerSpool = { matchExpressions = local.on_cpu_nodes }
      }
    }

    slurm-cluster = {
      clusterName = "soperator"
      k8sNodeFilters = [
        { name = "gpu", affinity = local.gpu_affinity, tolerations = local.gpu_tolerations },
        { name = "no-gpu", affinity = local.cpu_affinity },
      ]
      partitionConfiguration = {
        configType = "structured"
        partitions = [{ name = "main", isAll = true, config = "Default=YES MaxTime=INFINITE State=UP PriorityTier=10" }]
      }
      populateJail = { k8sNodeFilterName = "no-gpu" }
      sConfigController = {
        node           = { k8sNodeFilterName = "no-gpu" }
        serviceMonitor = { enabled = false }
      }
      slurmNodes = {
        controller = { volumes = { spool = { volumeClaimTemplateSpec = null, volumeSourceName = "controller-spool" } } }
        login = {
          size                                = 1
          sshRootPublicKeys                   = [var.ssh_public_key]
          sshdServiceLoadBalancerSourceRanges = var.api_allowed_cidrs
        }
      }
    }

    nodesets = {
      clusterName = "soperator"
      nodesets = [{
        name     = "worker"
        replicas = var.gpu_node_count
        gpu      = { enabled = true, nvidia = { gdrCopyEnabled = true } }
        docker   = { enabled = false }
        nodeConfig = {
          static     = "NodeCPUs=128 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=2 Gres=gpu:8"
          dynamic    = "InstanceId={{ .PodName }}"
          gresConfig = ["AutoDetect=nvidia"]
        }
        slurmd = {
          # 128 vCPUs and 1600 GB, less what the system, munge and other pods of the node need
          resources = { cpu = "120", memory = "1400Gi", ephemeralStorage = "55Gi", gpu = 8 }
          volumes = {
            spool            = { emptyDir = {} }
            jail             = { persistentVolumeClaim = { claimName = "jail-pvc" } }
            sharedMemorySize = "64Gi"
          }
        }
        munge       = { resources = { cpu = "2", memory = "4Gi", ephemeralStorage = "5Gi" } }
        affinity    = local.gpu_affinity
        tolerations = local.gpu_tolerations
      }]
    }
  }
}
